//! The planner against an oracle that simulates every plan of a small question.

use hpgo::cluster::{Cluster, Link, Machine};
use hpgo::cost::{MemoryModel, Model};
use hpgo::graph::{Graph, Layer, Measurement};
use hpgo::planner::hybrid::{self, Settings, WarmUp};
use hpgo::states::{DEFAULT_BOUND, States};
use hpgo::{Control, Error};
use proptest::prelude::*;
use proptest::bool::weighted;
use proptest::strategy::ValueTree;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

/// One question, small enough to try every plan.
#[derive(Debug, Clone)]
struct Question {
    graph: Graph,
    cluster: Cluster,
    settings: Settings,
}

fn layers(count: usize) -> impl Strategy<Value = Vec<Layer>> {
    let time_s = prop_oneof![Just(0.0), 0.1..1.0, 1.0..10.0, Just(1.0), Just(2.0)];
    let bytes = prop_oneof![Just(0.0), 1.0..100.0, 100.0..1_000.0, Just(50.0)];
    let layer = (time_s.clone(), time_s, bytes.clone(), bytes.clone(), bytes).prop_map(
        |(forward_s, backward_s, activation_bytes, saved_bytes, parameter_bytes)| Layer {
            name: "layer".into(),
            parameter_bytes,
            measured: vec![Measurement { forward_s, backward_s, activation_bytes, saved_bytes }],
        },
    );
    prop::collection::vec(layer, count)
}

/// A chain, or a chain with branches.
fn graphs() -> impl Strategy<Value = Graph> {
    (2_usize..6)
        .prop_flat_map(|count| {
            let edges = prop::collection::vec((0..count, 0..count), 0..4);
            (layers(count), any::<bool>(), edges, any::<bool>())
        })
        .prop_map(|(mut layers, is_chain, others, half_as_fast_alone)| {
            let count = layers.len();
            let mut edges: Vec<(usize, usize)> = (1..count).map(|to| (to - 1, to)).collect();
            if !is_chain {
                edges.retain(|&(from, _)| from % 2 == 0);
                edges.extend(others.into_iter().filter(|(from, to)| from < to));
            }
            let mut batch_sizes = vec![1];
            if half_as_fast_alone {
                batch_sizes.push(2);
                for layer in &mut layers {
                    let one = layer.measured[0];
                    layer.measured.push(Measurement {
                        activation_bytes: one.activation_bytes * 2.0,
                        saved_bytes: one.saved_bytes * 2.0,
                        ..one
                    });
                }
            }
            Graph { batch_sizes, layers, edges }
        })
}

fn clusters() -> impl Strategy<Value = Cluster> {
    let link = (prop_oneof![10.0..100.0, 100.0..1_000.0, Just(1e6)], 0.1..3.0, prop_oneof![Just(0.0), 0.01..0.5])
        .prop_map(|(bytes_per_s, factor, latency_s)| Link {
            bytes_per_s,
            collective_bytes_per_s: bytes_per_s * factor,
            latency_s,
        });
    let shape = prop_oneof![
        Just(vec![1]),
        Just(vec![1, 1]),
        Just(vec![2]),
        Just(vec![1, 2]),
        Just(vec![2, 2]),
        Just(vec![1, 1, 1]),
        Just(vec![1, 1, 1, 1]),
        Just(vec![4]),
        Just(vec![3, 1])
    ];
    let memory_bytes = prop_oneof![Just(1e9), 1_000.0..20_000.0];
    (shape, memory_bytes, prop_oneof![3 => Just(1.0), 1 => Just(2.0)], link.clone(), link).prop_map(
        |(shape, memory_bytes, first_speed, intra, inter)| Cluster {
            machines: (shape.into_iter().enumerate())
                .map(|(index, devices)| Machine {
                    devices,
                    memory_bytes,
                    speed: if index == 0 { first_speed } else { 1.0 },
                })
                .collect(),
            intra,
            inter,
        },
    )
}

fn questions() -> impl Strategy<Value = Question> {
    let warm_up = prop_oneof![2 => Just(WarmUp::Eager), 1 => Just(WarmUp::Least), 1 => Just(WarmUp::All)];
    let recompute = prop_oneof![Just(vec![false]), Just(vec![true]), Just(vec![false, true])];
    let batch = prop_oneof![Just(1_u32), Just(2), Just(4), Just(6), Just(8)];
    (graphs(), clusters(), batch, warm_up, recompute, any::<[bool; 3]>(), weighted(0.3)).prop_map(
        |(graph, cluster, global_batch, warm_up, recompute, [uneven_shares, overlap_sync, shard_optimizer], equal_replicas)| {
            let micro_batches = (1..=global_batch).filter(|size| global_batch.is_multiple_of(*size)).collect();
            let settings = Settings {
                global_batch,
                micro_batches,
                smallest_share: 1,
                uneven_shares,
                overlap_sync,
                recompute,
                warm_up,
                memory: MemoryModel {
                    gradients_per_weight: 1.0,
                    optimizer_per_weight: 2.0,
                    shard_optimizer,
                    reserved_bytes: 0.0,
                },
                most_stages: u32::MAX,
                most_replicas: u32::MAX,
                equal_replicas,
            };
            Question { graph, cluster, settings }
        },
    )
}

/// Two sums of the same times in different order differ by this much at most.
const ROUNDING: f64 = 1e-9;

#[test]
#[expect(clippy::print_stdout, reason = "figures for whoever runs it with `--nocapture`")]
fn the_bound_holds_and_the_plan_is_nearly_always_the_best_of_all() {
    let cases = std::env::var("HPGO_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(2_000_u32);
    let mut runner = TestRunner::new_with_rng(Config::default(), TestRng::deterministic_rng(RngAlgorithm::ChaCha));
    let control = Control::default();
    let (mut asked, mut missed, mut proved) = (0, 0, 0);
    let mut worst_gap: f64 = 0.0;
    while asked < cases {
        let question = questions().new_tree(&mut runner).expect("no filter rejects").current();
        let Question { graph, cluster, settings } = &question;
        let model = Model::new(graph, &States::of(graph, DEFAULT_BOUND).expect("a graph without cycles"));
        let best = hybrid::exhaustive(&model, cluster, settings, &control);
        let answer = hybrid::plan(&model, cluster, settings, &control);
        let (best_plan, best) = match best {
            Ok((plan, priced, _)) => (plan, priced),
            Err(Error::Infeasible { .. }) => {
                assert!(answer.is_err(), "no plan fits, but one was found: {answer:?}\n{question:?}");
                continue;
            }
            Err(Error::Argument { .. }) => continue, // too many cuts for the oracle
            Err(other) => panic!("{other}\n{question:?}"),
        };
        asked += 1;
        let answer = answer.unwrap_or_else(|error| panic!("{error}: there is {best_plan:?}\n{question:?}"));
        let rounding_s = ROUNDING * best.step_s;
        assert!(
            answer.lower_bound_s <= best.step_s + rounding_s,
            "bound {} is above the optimum {}: {best_plan:?}\n{question:?}",
            answer.lower_bound_s,
            best.step_s
        );
        assert!(answer.priced.step_s >= best.step_s - rounding_s, "the oracle missed {:?}\n{question:?}", answer.plan);
        assert!(best.path_s <= best.step_s + rounding_s, "a path is longer than the step: {best_plan:?}\n{question:?}");
        missed += u32::from(answer.priced.step_s > best.step_s + rounding_s);
        let gap = answer.priced.step_s / answer.lower_bound_s - 1.0;
        proved += u32::from(gap < ROUNDING || best.step_s == 0.0);
        if best.step_s > 0.0 {
            worst_gap = worst_gap.max(gap);
        }
    }
    assert!(missed * 100 <= asked, "{missed} of {asked} plans were not the best");
    println!("{asked} questions: {missed} missed, {proved} proved optimal, worst gap {:.2} %", worst_gap * 100.0);
}
