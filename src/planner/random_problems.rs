//! Random planning problems for tests, small enough to try every plan.

use proptest::prelude::*;

use super::hybrid::{Recompute, Settings, WarmUp};
use crate::cost::MemoryModel;
use crate::cost::network::{Cluster, Link, Node};
use crate::model::graph::{Graph, Layer, Measurement};

/// Returns settings without limits: 1F1B that overlaps the gradient all-reduce, without recomputation, with Adam.
pub(super) fn settings(global_batch: u32, pipeline_micro_batch_sizes: Vec<u32>) -> Settings {
    Settings {
        global_batch,
        pipeline_micro_batch_sizes,
        min_samples_per_replica: 1,
        uneven_shares: true,
        shares_by_speed: false,
        overlap_sync: true,
        overlap_p2p_comm: true,
        recompute: vec![Recompute::Never],
        warm_up: WarmUp::Min,
        memory: MemoryModel {
            gradients_per_weight: 1.0,
            optimizer_per_weight: 2.0,
            zero_stage: 0,
            max_zero_stage: 0,
            reserved_bytes: 0.0,
        },
        max_stages: u32::MAX,
        max_replicas: u32::MAX,
        equal_replicas: false,
    }
}

/// A model, a small cluster, and the number of devices that each stage of a test plan takes.
#[derive(Debug, Clone)]
pub(super) struct RandomProblem {
    pub graph: Graph,
    pub cluster: Cluster,
    pub settings: Settings,
    pub replicas: Vec<u32>,
}

/// Generates chains of 2 to 6 layers on 1 to 3 nodes, some of them short of memory.
pub(super) fn problems() -> impl Strategy<Value = RandomProblem> {
    let link =
        || {
            (10.0..1_000.0, 0.1..3.0, prop_oneof![Just(0.0), 0.01..0.5]).prop_map(|(bytes_per_s, factor, latency_s)| {
                Link { bytes_per_s, collective_bytes_per_s: bytes_per_s * factor, latency_s }
            })
        };
    let frozen = prop_oneof![4 => Just(0.0), 1 => 0.0..1.0, 1 => Just(1.0)];
    let layer = (0.1..3.0, 0.1..3.0, 0.0..500.0, 0.0..500.0, frozen).prop_map(
        |(forward_s, backward_s, activation_bytes, parameter_bytes, frozen)| Layer {
            name: "layer".into(),
            id: String::new(),
            parameter_bytes,
            frozen_bytes: frozen * parameter_bytes,
            measured: vec![Measurement {
                forward_s,
                backward_s,
                activation_bytes,
                saved_bytes: activation_bytes,
                halves_s: None,
            }],
        },
    );
    let speed = prop_oneof![2 => Just(1.0), 1 => 1.0..2.0];
    let memory = prop_oneof![2 => Just(1.0), 1 => 1.0..2.0];
    let nodes = prop::collection::vec((1_u32..4, speed, memory), 1..4);
    // Half of the problems have ample memory. In the others memory decides which plans fit.
    let memory_bytes = prop_oneof![Just(1e9), 3_000.0..20_000.0];
    let replicas = prop::collection::vec(1_u32..4, 1..6);
    let recompute = prop_oneof![Just(Recompute::Never), Just(Recompute::Always), Just(Recompute::ByStage)];
    let options = (recompute, any::<[bool; 2]>());
    (prop::collection::vec(layer, 2..7), nodes, memory_bytes, link(), link(), replicas, options).prop_map(
        |(layers, nodes, memory_bytes, intra, inter, replicas, (recompute, [overlap_sync, is_eager]))| RandomProblem {
            graph: Graph {
                batch_sizes: vec![1],
                edges: (1..layers.len()).map(|to| (to - 1, to)).collect(),
                layers,
                tied_weights: vec![],
            },
            cluster: Cluster {
                nodes: (nodes.into_iter())
                    .map(|(devices, speed, memory)| Node {
                        devices,
                        memory_bytes: memory_bytes * memory,
                        speed,
                        kind: 0,
                    })
                    .collect(),
                intra,
                inter,
            },
            settings: Settings {
                overlap_sync,
                recompute: vec![recompute],
                warm_up: if is_eager { WarmUp::Eager } else { WarmUp::Min },
                ..settings(12, vec![1, 2, 3, 6])
            },
            replicas,
        },
    )
}

/// Generates chains that were measured at three batch sizes, on up to twelve devices. In half of them the times of layers
/// may fall as the batch grows, as measured ones sometimes do.
pub(super) fn measured_at_several_sizes() -> impl Strategy<Value = RandomProblem> {
    let factors = || prop::collection::vec((0.3..2.0, 0.3..2.0, 0.5..2.0), 6);
    let nodes = prop_oneof![Just(vec![4, 4, 4]), Just(vec![6]), Just(vec![1; 6]), Just(vec![2, 3])];
    (problems(), [factors(), factors()], nodes, any::<bool>()).prop_map(|(mut problem, sizes, nodes, grows)| {
        problem.graph.layers.truncate(3);
        problem.graph.edges.retain(|&(_, to)| to < 3);
        problem.graph.batch_sizes = vec![1, 2, 4];
        for (index, layer) in problem.graph.layers.iter_mut().enumerate() {
            for factors in &sizes {
                let (forward, backward, bytes) = factors[index];
                let least = if grows { 1.0 } else { 0.0 };
                let last = layer.measured[layer.measured.len() - 1];
                let activation_bytes = last.activation_bytes * f64::max(bytes, least);
                layer.measured.push(Measurement {
                    forward_s: last.forward_s * f64::max(forward, least),
                    backward_s: last.backward_s * f64::max(backward, least),
                    activation_bytes,
                    saved_bytes: activation_bytes,
                    halves_s: None,
                });
            }
        }
        let Node { memory_bytes, speed, .. } = problem.cluster.nodes[0];
        let node = |devices| Node { devices, memory_bytes, speed, kind: 0 };
        problem.cluster.nodes = nodes.into_iter().map(node).collect();
        problem.settings.global_batch = 12;
        problem.settings.pipeline_micro_batch_sizes = vec![4, 6, 12];
        problem
    })
}

/// Generates branching graphs with few layers on small clusters.
pub(super) fn branching() -> impl Strategy<Value = RandomProblem> {
    let edges = prop::collection::vec((0_usize..5, 0_usize..5), 0..5);
    (problems(), edges, 3_usize..6).prop_map(|(mut problem, others, max)| {
        problem.graph.layers.truncate(max);
        let count = problem.graph.layers.len();
        let is_edge = |&(from, to): &(usize, usize)| from < to && to < count;
        // A chain with some of its edges removed and other edges added.
        problem.graph.edges.retain(|&(from, to)| to < count && from % 2 == others.len() % 2);
        problem.graph.edges.extend(others.into_iter().filter(is_edge));
        problem.graph.edges.sort_unstable();
        problem.graph.edges.dedup();
        // Graphs with more layers have many more plans, so they get fewer nodes to keep the enumeration short.
        problem.cluster.nodes.truncate(if count > 4 { 2 } else { 3 });
        problem.settings.global_batch = 6;
        problem.settings.pipeline_micro_batch_sizes = vec![2, 3, 6];
        problem
    })
}

/// Generates models with few layers and few samples on nodes of different speed, whose plans can't use all devices.
pub(super) fn few_layers_on_many_devices() -> impl Strategy<Value = RandomProblem> {
    let speeds = prop::collection::vec(prop_oneof![Just(1.0), 0.3..3.0], 3);
    (problems(), 1_usize..4, 1_u32..4, speeds).prop_map(|(mut problem, layers, replicas, speeds)| {
        problem.graph.layers.truncate(layers);
        problem.graph.edges.retain(|&(_, to)| to < layers);
        let node = |(index, speed): (u32, f64)| Node { devices: 1 + index, memory_bytes: 1e9, speed, kind: 0 };
        problem.cluster.nodes = (0..).zip(speeds).map(node).collect();
        problem.settings.pipeline_micro_batch_sizes = vec![1, 2, 3];
        problem.settings.max_replicas = replicas;
        problem
    })
}

/// Generates pipelines of single devices with long latencies and many micro-batches in flight: stages mostly wait.
pub(super) fn far_apart() -> impl Strategy<Value = RandomProblem> {
    (problems(), 3_usize..6, 0.5..5.0).prop_map(|(mut problem, stages, latency_s)| {
        problem.replicas = vec![1; stages];
        for node in &mut problem.cluster.nodes {
            (node.memory_bytes, node.devices, node.speed) = (1e9, stages as u32, 1.0);
        }
        problem.cluster.intra.latency_s = latency_s;
        problem.cluster.inter.latency_s = latency_s;
        // Without weights there is no all-reduce, so that waiting alone decides the step.
        for layer in &mut problem.graph.layers {
            (layer.parameter_bytes, layer.frozen_bytes) = (0.0, 0.0);
        }
        problem.settings.warm_up = WarmUp::Eager;
        problem
    })
}
