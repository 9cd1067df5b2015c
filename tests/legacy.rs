//! The original HPGO's formulas, by values worked out by hand.

#![allow(missing_docs)]

use hpgo::model::graph::{Graph, Layer, Measurement};
use hpgo::planner::legacy::{Devices, Model, best, columns, plans};
use hpgo::{Control, Error};

fn close(one: f64, two: f64) -> bool {
    (one - two).abs() <= 1e-9 * two.abs()
}

/// Layers of `(seconds, activation bytes, parameter bytes)`, half of the time forward, at batch size 1.
fn chain(layers: &[(f64, f64, f64)]) -> Graph {
    let layer = |(index, &(seconds, activation_bytes, parameter_bytes)): (usize, &(f64, f64, f64))| Layer {
        name: format!("layer {index}"),
        id: String::new(),
        parameter_bytes,
        measured: vec![Measurement {
            forward_s: seconds / 2.0,
            backward_s: seconds / 2.0,
            activation_bytes,
            ..Measurement::default()
        }],
        ..Layer::default()
    };
    Graph {
        batch_sizes: vec![1],
        layers: layers.iter().enumerate().map(layer).collect(),
        edges: (1..layers.len()).map(|to| (to - 1, to)).collect(),
        tied_weights: Vec::new(),
    }
}

#[test]
fn an_all_reduce_takes_what_the_original_says() {
    let devices = Devices::new(&[8, 16]).unwrap();
    let within: Vec<u32> = (0..8).collect();
    assert!(close(devices.all_reduce_s(&within, 1e9), 0.0175));
    assert!(close(devices.all_reduce_s(&[0, 1, 2, 3, 8, 9, 10, 11], 1e9), 1.75 / 3.0));
    assert!(close(devices.all_reduce_s(&[0, 1, 2], 3e9), 4.0 / 25.0)); // three devices use one link
}

#[test]
fn a_transfer_takes_what_the_original_says() {
    let devices = Devices::new(&[8, 16]).unwrap();
    assert!(close(devices.split_concat_s(&[0, 1, 2, 3], &[4, 5, 6, 7], 1e9), 0.04));
    assert!(close(devices.split_concat_s(&[0, 1, 8, 9], &[10, 11, 12, 13], 1e9), 0.5));
    assert!(close(devices.split_concat_s(&[0], &[7, 8], 3e9), 1.0));
}

#[test]
fn data_parallelism_pays_the_all_reduce_after_one_micro_batch_per_pipeline() {
    // 2 devices, 4 samples of 1 s, 25 GB of weights: 2 s of work on each, then 1 s for the gradients.
    let model = Model::of(&chain(&[(1.0, 0.0, 25e9)]), 4).unwrap();
    let found = plans(&model, &Devices::new(&[2]).unwrap(), 1, &Control::default()).unwrap();
    assert_eq!(found.len(), 1);
    // As two halves of one pipeline: blocks of 0.5 s, three of them before the last sample's full second.
    assert!(close(found[0].speedup, 4.0 / (1.5 + 1.0 + 1.0)));
}

#[test]
fn a_stage_that_is_not_the_last_sums_the_gradients_of_one_state_too_many() {
    // 4 samples of 8 + 1 s on 2:1 devices: blocks of 4 s, three before the last sample's 9 s; then 2 s for the weights
    // of both states between devices 0 and 1, where the first state's alone would take 1 s.
    let model = Model::of(&chain(&[(8.0, 0.0, 25e9), (1.0, 0.0, 25e9)]), 4).unwrap();
    let found = plans(&model, &Devices::new(&[3]).unwrap(), 1, &Control::default()).unwrap();
    let split = best(&found[2..]).unwrap();
    assert_eq!(split.stages[0].devices, [0, 1]);
    assert!(close(split.speedup, 36.0 / (12.0 + 9.0 + 2.0)));
}

#[test]
fn too_many_antichains_leave_another_list_of_cuts() {
    // Three branches of thirty layers: more than thirty thousand down-sets.
    let mut graph = chain(&[(1.0, 1.0, 1.0); 92]);
    graph.edges = Vec::new();
    for branch in 0..3 {
        let layers: Vec<usize> = (0..30).map(|layer| 1 + branch * 30 + layer).collect();
        graph.edges.push((0, layers[0]));
        graph.edges.extend(layers.windows(2).map(|pair| (pair[0], pair[1])));
        graph.edges.push((layers[29], 91));
    }
    let model = Model::of(&graph, 1).unwrap();
    assert_eq!(model.states.len(), 92);
    let found = plans(&model, &Devices::new(&[2, 4]).unwrap(), 1, &Control::default()).unwrap();
    assert!(best(&found).unwrap().speedup > 0.0);
}

#[test]
fn gradients_hide_behind_the_backward_pass_of_the_layers_before() {
    // 2 devices, 25 GB/s: 1 s for each layer's gradients. The first layer's always come late; the second layer's hide
    // behind the first layer's backward second (one sample: half of 2 s), the third layer's behind the second's.
    let model = Model::of(&chain(&[(2.0, 0.0, 25e9); 3]), 1).unwrap();
    let found = columns(&model, &Devices::new(&[2]).unwrap(), 0.1, 1.0);
    assert!(close(found.no_overlap, 6.0 / (3.0 + 3.0)));
    assert!(close(found.overlap.unwrap(), 6.0 / (3.0 + 1.0)));
    assert!(close(found.p3.unwrap(), 6.0 / (3.0 + 1.0)));
    // Nothing fits beside twice the weights.
    assert_eq!(columns(&model, &Devices::new(&[2]).unwrap(), 2.0, 1.0).p3, None);
}

#[test]
fn bad_ends_of_nodes_are_named() {
    for seps in [&[][..], &[0, 4], &[4, 4], &[8, 4], &[5000]] {
        let Err(Error::Argument { message, .. }) = Devices::new(seps) else { panic!("{seps:?} was taken") };
        assert!(message.starts_with("seps"), "{message}");
    }
}
