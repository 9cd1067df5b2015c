//! The planner against an oracle that simulates every plan of a small question.

use std::cell::Cell;

use hpgo::control::Stopped;
use hpgo::cost::network::{Cluster, Link, Node};
use hpgo::cost::{DeviceKinds, LayerSums, MemoryModel, TypeTimes};
use hpgo::model::graph::{Graph, Layer, Measurement};
use hpgo::model::lineage::Lineage;
use hpgo::model::states::{CutPoints, DEFAULT_BOUND};
use hpgo::planner::hybrid::{
    self, CandidatePlan, EvaluatedPlan, PlanEvaluator, Recompute, Schedules, SearchResult, Settings, StageCandidate,
    WarmUp,
};
use hpgo::{Control, Error};
use proptest::bool::weighted;
use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestRng, TestRunner};

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
    let frozen = prop_oneof![4 => Just(0.0), 1 => 0.0..1.0, 1 => Just(1.0)];
    let layer = (time_s.clone(), time_s, bytes.clone(), bytes.clone(), bytes, frozen).prop_map(
        |(forward_s, backward_s, activation_bytes, saved_bytes, parameter_bytes, frozen)| Layer {
            name: "layer".into(),
            id: String::new(),
            parameter_bytes,
            frozen_bytes: frozen * parameter_bytes,
            measured: vec![Measurement { forward_s, backward_s, activation_bytes, saved_bytes, halves_s: None }],
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
            Graph { batch_sizes, layers, edges, tied_weights: vec![] }
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
            nodes: (shape.into_iter().enumerate())
                .map(|(index, devices)| Node {
                    devices,
                    memory_bytes,
                    speed: if index == 0 { first_speed } else { 1.0 },
                    kind: 0,
                })
                .collect(),
            intra,
            inter,
        },
    )
}

/// Nodes of several devices, up to nine in all, that differ in speed and memory.
fn larger_clusters() -> impl Strategy<Value = Cluster> {
    let shape = prop_oneof![
        Just(vec![2, 2]),
        Just(vec![3, 3]),
        Just(vec![4, 2]),
        Just(vec![2, 2, 2]),
        Just(vec![3, 2, 1]),
        Just(vec![1, 1, 1, 1]),
        Just(vec![2, 2, 2, 2]),
        Just(vec![3, 3, 3]),
        Just(vec![1, 1, 1, 1, 1, 1]),
    ];
    let each = (
        prop_oneof![3 => Just(1.0), 1 => Just(0.5), 1 => Just(2.0), 2 => 0.3..3.0],
        prop_oneof![2 => Just(1.0), 1 => Just(2.0)],
    );
    let few = prop_oneof![2 => Just(1_usize), 2 => Just(2), 1 => Just(4)];
    (clusters(), shape, prop::collection::vec(each, 4), few).prop_map(|(links, shape, classes, few)| Cluster {
        nodes: (shape.into_iter().enumerate())
            .map(|(index, devices)| {
                let (speed, memory) = classes[index % few];
                let memory_bytes = links.nodes[0].memory_bytes * memory;
                Node { devices, memory_bytes, speed, kind: 0 }
            })
            .collect(),
        ..links
    })
}

fn questions() -> impl Strategy<Value = Question> {
    let warm_up = prop_oneof![2 => Just(WarmUp::Eager), 1 => Just(WarmUp::Min), 1 => Just(WarmUp::All)];
    let both = vec![Recompute::Never, Recompute::Always];
    let by_stage = Just(vec![Recompute::ByStage]);
    let recompute = prop_oneof![Just(vec![Recompute::Never]), Just(vec![Recompute::Always]), Just(both), by_stage];
    let batch = prop_oneof![Just(1_u32), Just(2), Just(4), Just(6), Just(8)];
    (graphs(), clusters(), batch, warm_up, recompute, any::<[bool; 3]>(), 0_u8..5, weighted(0.3)).prop_map(
        |(
            graph,
            cluster,
            global_batch,
            warm_up,
            recompute,
            [uneven_shares, overlap_sync, overlap_p2p_comm],
            zero_stage,
            equal_replicas,
        )| {
            // The last one leaves the choice to each stage, which the settings allow for one of two choices only.
            let is_by_stage = zero_stage == 4 && !recompute.contains(&Recompute::ByStage);
            let (zero_stage, max_zero_stage) = if is_by_stage { (1, 3) } else { (zero_stage % 4, zero_stage % 4) };
            let pipeline_micro_batch_sizes =
                (1..=global_batch).filter(|size| global_batch.is_multiple_of(*size)).collect();
            let settings = Settings {
                global_batch,
                pipeline_micro_batch_sizes,
                min_samples_per_replica: 1,
                uneven_shares,
                shares_by_speed: false,
                overlap_sync,
                overlap_p2p_comm,
                recompute,
                warm_up,
                memory: MemoryModel {
                    gradients_per_weight: 1.0,
                    optimizer_per_weight: 2.0,
                    zero_stage,
                    max_zero_stage,
                    reserved_bytes: 0.0,
                },
                max_stages: u32::MAX,
                max_replicas: u32::MAX,
                equal_replicas,
            };
            Question { graph, cluster, settings }
        },
    )
}

/// Two sums of the same times in different order differ by this much at most.
const ROUNDING: f64 = 1e-9;

/// The best of all plans of a question, and what the planner says.
struct PlanScore {
    best: Result<(CandidatePlan, EvaluatedPlan), Error>,
    answer: Result<SearchResult, Error>,
}

/// Holds `promise` against many questions that are small enough for the oracle; a question that breaks it is made
/// smaller before it is shown.
fn holds(promise: impl Fn(&PlanScore) -> Result<(), TestCaseError>) {
    let cases = std::env::var("HPGO_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(2_000_u32);
    let config = Config { cases, max_global_rejects: 100 * cases, failure_persistence: None, ..Config::default() };
    let mut runner = TestRunner::new_with_rng(config, TestRng::deterministic_rng(RngAlgorithm::ChaCha));
    let control = Control::default();
    let outcome = runner.run(&questions(), |Question { graph, cluster, settings }| {
        let model = LayerSums::new(&graph, &CutPoints::of(&graph, DEFAULT_BOUND).expect("a graph without cycles"));
        let best = match hybrid::exhaustive(&model, &cluster, &settings, &control) {
            Err(Error::Argument { .. }) => return Err(TestCaseError::reject("too many cuts for the oracle")),
            best => best.map(|(plan, evaluated, _)| (plan, evaluated)),
        };
        promise(&PlanScore { best, answer: hybrid::plan(&model, &cluster, &settings, &control) })
    });
    if let Err(error) = outcome {
        panic!("{error}");
    }
}

impl PlanScore {
    /// The oracle's plan with its price, and the planner's answer, of a question that has one.
    fn both(&self) -> Result<(&CandidatePlan, &EvaluatedPlan, &SearchResult), TestCaseError> {
        let Ok((plan, evaluated)) = &self.best else { return Err(TestCaseError::reject("no plan fits")) };
        match &self.answer {
            Ok(answer) => Ok((plan, evaluated, answer)),
            Err(error) => Err(TestCaseError::fail(format!("{error}: there is {plan:?}"))),
        }
    }
}

#[test]
fn there_is_an_answer_exactly_where_a_plan_fits() {
    holds(|judged| {
        prop_assert!(matches!(judged.best, Ok(_) | Err(Error::Infeasible { .. })), "{:?}", judged.best);
        prop_assert_eq!(judged.best.is_ok(), judged.answer.is_ok(), "{:?} and {:?}", judged.best, judged.answer);
        Ok(())
    });
}

#[test]
fn the_bound_is_above_no_plan() {
    holds(|judged| {
        let (plan, best, answer) = judged.both()?;
        let (bound_s, step_s) = (answer.lower_bound_s, best.step_s);
        prop_assert!(bound_s <= step_s * (1.0 + ROUNDING), "bound {} is above {}: {:?}", bound_s, step_s, plan);
        Ok(())
    });
}

#[test]
fn no_answer_is_shorter_than_the_best_of_all_plans() {
    holds(|judged| {
        let (_, best, answer) = judged.both()?;
        prop_assert!(answer.evaluated.step_s >= best.step_s * (1.0 - ROUNDING), "the oracle missed {:?}", answer.plan);
        Ok(())
    });
}

#[test]
fn no_path_through_the_best_of_all_plans_is_longer_than_its_step() {
    holds(|judged| {
        let (plan, best, _) = judged.both()?;
        prop_assert!(best.path_s <= best.step_s * (1.0 + ROUNDING), "{} in {:?}", best.path_s, plan);
        Ok(())
    });
}

#[test]
#[expect(clippy::print_stdout, reason = "figures for whoever runs it with `--nocapture`")]
fn the_answer_is_nearly_always_the_best_of_all_plans() {
    let (asked, missed, proved, worst_gap) = (Cell::new(0), Cell::new(0), Cell::new(0), Cell::new(0.0_f64));
    holds(|judged| {
        let (_, best, answer) = judged.both()?;
        asked.set(asked.get() + 1);
        missed.set(missed.get() + u32::from(answer.evaluated.step_s > best.step_s * (1.0 + ROUNDING)));
        let gap = answer.evaluated.step_s / answer.lower_bound_s - 1.0;
        proved.set(proved.get() + u32::from(gap < ROUNDING || best.step_s == 0.0));
        if best.step_s > 0.0 {
            worst_gap.set(worst_gap.get().max(gap));
        }
        Ok(())
    });
    let (asked, missed, proved, worst_gap) = (asked.get(), missed.get(), proved.get(), 100.0 * worst_gap.get());
    assert!(missed * 100 <= asked, "{missed} of {asked} plans were not the best");
    println!("{asked} questions: {missed} missed, {proved} proved optimal, worst gap {worst_gap:.2} %");
}

/// A share of a bound of 0 is no rise, so a search that rises in shares must notice that it does not.
#[test]
fn the_bound_of_layers_that_take_no_time_is_found() {
    let config = Config { cases: 50, failure_persistence: None, ..Config::default() };
    let mut runner = TestRunner::new_with_rng(config, TestRng::deterministic_rng(RngAlgorithm::ChaCha));
    let control = Control::default();
    let outcome = runner.run(&questions(), |Question { mut graph, cluster, settings }| {
        for measured in graph.layers.iter_mut().flat_map(|layer| &mut layer.measured) {
            (measured.forward_s, measured.backward_s, measured.halves_s) = (0.0, 0.0, None);
        }
        let model = LayerSums::new(&graph, &CutPoints::of(&graph, DEFAULT_BOUND).expect("a graph without cycles"));
        let bound_s = hybrid::min_step_of_all_s(&model, &cluster, &settings, f64::INFINITY, &control)
            .map_err(|error| TestCaseError::fail(error.to_string()))?;
        prop_assert!(bound_s >= 0.0);
        Ok(())
    });
    if let Err(error) = outcome {
        panic!("{error}");
    }
}

/// What large clusters are bounded by, asked of small ones, whose placements can all be tried.
#[test]
#[expect(clippy::print_stdout, reason = "figures for whoever runs it with `--nocapture`")]
fn the_bound_on_all_placements_is_above_no_plan() {
    let cases = std::env::var("HPGO_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(300_u32);
    let config = Config { cases, max_global_rejects: 100 * cases, failure_persistence: None, ..Config::default() };
    let mut runner = TestRunner::new_with_rng(config, TestRng::deterministic_rng(RngAlgorithm::ChaCha));
    let control = Control::default();
    let (asked, closed, ratios) = (Cell::new(0), Cell::new(0), Cell::new(0.0));
    let larger = (questions(), larger_clusters()).prop_map(|(question, cluster)| Question { cluster, ..question });
    let outcome = runner.run(&larger, |Question { graph, cluster, settings }| {
        let model = LayerSums::new(&graph, &CutPoints::of(&graph, DEFAULT_BOUND).expect("a graph without cycles"));
        if model.cuts() > if cluster.devices() > 6 { 4 } else { 6 } {
            return Err(TestCaseError::reject("too many plans"));
        }
        let Ok((plan, best, _)) = hybrid::exhaustive(&model, &cluster, &settings, &control) else {
            return Err(TestCaseError::reject("no plan fits"));
        };
        for below_s in [best.step_s * 1.000_01, best.step_s * 1.5, f64::INFINITY] {
            let bound_s = hybrid::min_step_of_all_s(&model, &cluster, &settings, below_s, &control)
                .map_err(|error| TestCaseError::fail(error.to_string()))?;
            let holds = bound_s <= best.step_s * (1.0 + ROUNDING);
            prop_assert!(holds, "bound {} under {} is above {}: {:?}", bound_s, below_s, best.step_s, plan);
            if below_s.is_finite() && below_s > best.step_s * 1.2 {
                asked.set(asked.get() + 1);
                closed.set(closed.get() + u32::from(bound_s >= best.step_s * (1.0 - 1e-6)));
                ratios.set(ratios.get() + if best.step_s > 0.0 { bound_s / best.step_s } else { 1.0 });
            }
        }
        Ok(())
    });
    if let Err(error) = outcome {
        panic!("{error}");
    }
    let (asked, closed, mean) = (asked.get(), closed.get(), ratios.get() / f64::from(asked.get()));
    println!("{asked} questions, {closed} closed, bound / optimum {mean:.4} on average");
}

/// Forward and backward time of each layer.
type LayerTimes = Vec<(f64, f64)>;

/// Times of up to three device types, of which layers gain by different factors, and the type of each node.
fn types(layers: usize, nodes: usize) -> impl Strategy<Value = (Vec<LayerTimes>, Vec<Option<u32>>)> {
    let factor = || prop_oneof![Just(1.0), Just(2.0), 0.2..5.0_f64];
    let gains = prop::collection::vec(prop::collection::vec((factor(), factor()), layers), 3);
    (gains, prop::collection::vec(prop_oneof![4 => (0_u32..3).prop_map(Some), 1 => Just(None)], nodes))
}

/// Returns the times of each type.
fn times_by_type(graph: &Graph, gains: &[LayerTimes]) -> Vec<TypeTimes> {
    let of_layer = |(layer, &(forward, backward)): (&Layer, &(f64, f64))| {
        let on_type = |at: &Measurement| Measurement {
            forward_s: at.forward_s * forward,
            backward_s: at.backward_s * backward,
            halves_s: None,
            ..*at
        };
        layer.measured.iter().map(on_type).collect()
    };
    gains.iter().map(|gains| graph.layers.iter().zip(gains).map(of_layer).collect()).collect()
}

/// Plans and bounds on nodes of several device types, whose layers differ by other factors, against every plan.
#[test]
#[expect(clippy::print_stdout, reason = "figures for whoever runs it with `--nocapture`")]
fn plans_on_several_device_types_are_nearly_always_the_best_of_all() {
    let cases = std::env::var("HPGO_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(300_u32);
    let config = Config { cases, max_global_rejects: 100 * cases, failure_persistence: None, ..Config::default() };
    let mut runner = TestRunner::new_with_rng(config, TestRng::deterministic_rng(RngAlgorithm::ChaCha));
    let control = Control::default();
    let (asked, mixed, missed, proved, closed) = (Cell::new(0), Cell::new(0), Cell::new(0), Cell::new(0), Cell::new(0));
    let several = (questions(), prop_oneof![clusters(), larger_clusters()])
        .prop_map(|(question, cluster)| Question { cluster, ..question })
        .prop_flat_map(|question| {
            let (layers, nodes) = (question.graph.layers.len(), question.cluster.nodes.len());
            (Just(question), types(layers, nodes))
        });
    let outcome = runner.run(&several, |(Question { graph, cluster, settings }, (gains, type_of))| {
        let types = times_by_type(&graph, &gains);
        let (kinds, cluster) = DeviceKinds::of(&graph, &types, cluster, &type_of).expect("there are few kinds");
        let Some(kinds) = kinds else { return Err(TestCaseError::reject("no node has a type")) };
        let model = kinds.sums(&graph, &CutPoints::of(&graph, DEFAULT_BOUND).expect("a graph without cycles"));
        if model.cuts() > if cluster.devices() > 6 { 4 } else { 6 } {
            return Err(TestCaseError::reject("too many plans"));
        }
        let best = hybrid::exhaustive(&model, &cluster, &settings, &control);
        let answer = hybrid::plan(&model, &cluster, &settings, &control);
        let (Ok((plan, best, _)), Ok(answer)) = (&best, &answer) else {
            prop_assert_eq!(best.is_ok(), answer.is_ok(), "{:?} and {:?}", best, answer);
            return Err(TestCaseError::reject("no plan fits"));
        };
        let (bound_s, step_s) = (answer.lower_bound_s, answer.evaluated.step_s);
        prop_assert!(bound_s <= best.step_s * (1.0 + ROUNDING), "{} is above {}: {:?}", bound_s, best.step_s, plan);
        prop_assert!(step_s >= best.step_s * (1.0 - ROUNDING), "the oracle missed {:?}", answer.plan);
        prop_assert!(best.path_s <= best.step_s * (1.0 + ROUNDING), "{} in {:?}", best.path_s, plan);
        for below_s in [best.step_s * 1.5, f64::INFINITY] {
            let all_s = hybrid::min_step_of_all_s(&model, &cluster, &settings, below_s, &control)
                .map_err(|error| TestCaseError::fail(error.to_string()))?;
            prop_assert!(all_s <= best.step_s * (1.0 + ROUNDING), "{} is above {}: {:?}", all_s, best.step_s, plan);
            closed.set(closed.get() + u32::from(all_s >= best.step_s * (1.0 - 1e-6)));
        }
        let min_s = hybrid::min_step_of_all_cuts_s(&model, &cluster, &settings);
        prop_assert!(min_s <= best.step_s * (1.0 + ROUNDING), "{} is above {}", min_s, best.step_s);
        for splits_backward in [false, true] {
            let order = hybrid::AnyOrder { splits_backward, is_sequential: false };
            let problem = (&model, &cluster, &settings);
            let found = hybrid::min_step_of_any_order_s(problem, order, (&[], 2.0 * best.step_s), &control);
            let any_s = found.lower_bound_s;
            prop_assert!(any_s <= best.step_s * (1.0 + ROUNDING), "{} is above {}: {:?}", any_s, best.step_s, plan);
        }
        asked.set(asked.get() + 1);
        let is_mixed = plan.stages.iter().any(|stage| {
            let mut kinds = stage.footprint.iter().map(|&(node, _)| cluster.nodes[node as usize].kind);
            let first = kinds.next();
            kinds.any(|kind| Some(kind) != first)
        });
        mixed.set(mixed.get() + u32::from(is_mixed));
        missed.set(missed.get() + u32::from(step_s > best.step_s * (1.0 + ROUNDING)));
        proved.set(proved.get() + u32::from(bound_s >= step_s * (1.0 - ROUNDING)));
        Ok(())
    });
    if let Err(error) = outcome {
        panic!("{error}");
    }
    let (asked, mixed, missed, proved, closed) = (asked.get(), mixed.get(), missed.get(), proved.get(), closed.get());
    assert!(missed * 100 <= asked, "{missed} of {asked} plans were not the best");
    assert!(mixed > 0, "no best plan has a stage on several types");
    println!(
        "{asked} questions, {mixed} with a stage on several types: {missed} missed, {proved} proved optimal, \
         {closed} of {} bounds on all placements closed",
        2 * asked
    );
}

/// A type whose layers all take the same share of the profile's times is a device of that speed.
#[test]
fn times_that_differ_by_one_factor_are_a_speed() {
    let cases = std::env::var("HPGO_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(100_u32);
    let config = Config { cases, max_global_rejects: 100 * cases, failure_persistence: None, ..Config::default() };
    let mut runner = TestRunner::new_with_rng(config, TestRng::deterministic_rng(RngAlgorithm::ChaCha));
    let control = Control::default();
    let several = (questions(), larger_clusters()).prop_map(|(question, cluster)| Question { cluster, ..question });
    let outcome = runner.run(&several, |Question { graph, cluster, settings }| {
        let states = CutPoints::of(&graph, DEFAULT_BOUND).expect("a graph without cycles");
        let with_speeds = LayerSums::new(&graph, &states);
        let inverse = |node: &Node| vec![(1.0 / node.speed, 1.0 / node.speed); graph.layers.len()];
        let types = times_by_type(&graph, &cluster.nodes.iter().map(inverse).collect::<Vec<_>>());
        let type_of: Vec<_> = (0..cluster.nodes.len() as u32).map(Some).collect();
        let (kinds, of_kinds) =
            DeviceKinds::of(&graph, &types, cluster.clone(), &type_of).expect("there are few kinds");
        let with_types = kinds.expect("every node has a type").sums(&graph, &states);
        let (Ok(one), Ok(two)) = (
            hybrid::plan(&with_speeds, &cluster, &settings, &control),
            hybrid::plan(&with_types, &of_kinds, &settings, &control),
        ) else {
            return Err(TestCaseError::reject("no plan fits"));
        };
        let is_equal = |a: f64, b: f64| (a - b).abs() <= ROUNDING * a.max(b);
        // Either search may miss the best plan or prove less. So each plan is priced with the other's times.
        let price =
            |model, cluster, plan| PlanEvaluator::new(model, cluster, &settings).evaluate(plan).map(|it| it.step_s);
        for plan in [&one.plan, &two.plan] {
            let (with_speeds_s, with_types_s) =
                (price(&with_speeds, &cluster, plan), price(&with_types, &of_kinds, plan));
            let (with_speeds_s, with_types_s) = (with_speeds_s.expect("a plan"), with_types_s.expect("a plan"));
            prop_assert!(is_equal(with_speeds_s, with_types_s), "{} and {}", with_speeds_s, with_types_s);
        }
        let bounds = [(&with_speeds, &cluster), (&with_types, &of_kinds)]
            .map(|(model, cluster)| hybrid::min_step_of_all_cuts_s(model, cluster, &settings));
        prop_assert!(is_equal(bounds[0], bounds[1]), "{:?}", bounds);
        Ok(())
    });
    if let Err(error) = outcome {
        panic!("{error}");
    }
}

/// A search that knows the cuts of one order of the layers, held against every plan with any cuts.
#[test]
#[expect(clippy::print_stdout, reason = "figures for whoever runs it with `--nocapture`")]
fn a_search_of_some_cuts_has_a_bound_over_all_and_never_says_that_nothing_fits_where_a_plan_with_others_does() {
    let cases = std::env::var("HPGO_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(600_u32);
    let config = Config { cases, max_global_rejects: 100 * cases, failure_persistence: None, ..Config::default() };
    let mut runner = TestRunner::new_with_rng(config, TestRng::deterministic_rng(RngAlgorithm::ChaCha));
    let control = Control::default();
    let (asked, beaten, missed) = (Cell::new(0), Cell::new(0), Cell::new(0));
    let outcome = runner.run(&questions(), |Question { graph, cluster, settings }| {
        let all = LayerSums::new(&graph, &CutPoints::of(&graph, DEFAULT_BOUND).expect("a graph without cycles"));
        let some = LayerSums::new(&graph, &CutPoints::of(&graph, 0).expect("a graph without cycles"));
        if some.has_all_cuts {
            return Err(TestCaseError::reject("a chain has one order"));
        }
        let best = match hybrid::exhaustive(&all, &cluster, &settings, &control) {
            Ok((_, best, _)) => Some(best.step_s),
            Err(Error::Infeasible { .. }) => None,
            Err(_) => return Err(TestCaseError::reject("too many cuts for the oracle")),
        };
        asked.set(asked.get() + 1);
        match (hybrid::plan(&some, &cluster, &settings, &control), best) {
            (Ok(answer), Some(best_s)) => {
                let min_s = hybrid::min_step_of_all_cuts_s(&all, &cluster, &settings);
                prop_assert!(min_s <= best_s * (1.0 + ROUNDING), "{} is above {}", min_s, best_s);
                prop_assert!(answer.lower_bound_s <= best_s * (1.0 + ROUNDING), "{} {}", answer.lower_bound_s, best_s);
                let searched_s = answer.searched_cuts_bound_s.expect("these are not all cuts");
                prop_assert!(answer.lower_bound_s <= searched_s);
                prop_assert!(searched_s <= answer.evaluated.step_s * (1.0 + ROUNDING));
                beaten.set(beaten.get() + u32::from(best_s < searched_s * (1.0 - ROUNDING)));
            }
            (Err(Error::Infeasible { message, .. }), Some(_)) => {
                missed.set(missed.get() + 1);
                prop_assert!(message.starts_with("no plan was found that fits"), "{}", message);
            }
            (Err(Error::Infeasible { .. }), None) => {}
            (answer, best) => prop_assert!(false, "{:?} and {:?}", answer, best),
        }
        Ok(())
    });
    if let Err(error) = outcome {
        panic!("{error}");
    }
    let (asked, beaten, missed) = (asked.get(), beaten.get(), missed.get());
    println!("{asked} questions: other cuts beat the bound of {beaten}, and fit where none was found in {missed}");
    assert!(beaten > 0, "no question tells the two bounds apart");
}

/// The conditions on memory, for the settings' schedule and for others, held against every plan.
#[test]
#[expect(clippy::print_stdout, reason = "figures for whoever runs it with `--nocapture`")]
fn nothing_is_said_to_fit_nowhere_where_a_plan_fits() {
    let cases = std::env::var("HPGO_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(2_000_u32);
    let config = Config { cases, max_global_rejects: 100 * cases, failure_persistence: None, ..Config::default() };
    let mut runner = TestRunner::new_with_rng(config, TestRng::deterministic_rng(RngAlgorithm::ChaCha));
    let control = Control::default();
    let (infeasible, shown) = (Cell::new(0), Cell::new(0));
    let short = (questions(), prop_oneof![clusters(), larger_clusters()], 0.2..1.0_f64).prop_map(
        |(question, cluster, share)| {
            let shrink = |node: Node| Node { memory_bytes: node.memory_bytes.min(9_000.0) * share, ..node };
            let nodes = cluster.nodes.into_iter().map(shrink).collect();
            Question { cluster: Cluster { nodes, ..cluster }, ..question }
        },
    );
    let outcome = runner.run(&short, |Question { graph, cluster, settings }| {
        let model = LayerSums::new(&graph, &CutPoints::of(&graph, DEFAULT_BOUND).expect("a graph without cycles"));
        if model.cuts() > if cluster.devices() > 6 { 4 } else { 6 } {
            return Err(TestCaseError::reject("too many plans"));
        }
        let fits = |settings: &Settings| match hybrid::exhaustive(&model, &cluster, settings, &control) {
            Ok(_) => Ok(true),
            Err(Error::Infeasible { .. }) => Ok(false),
            Err(_) => Err(TestCaseError::reject("too many cuts for the oracle")),
        };
        let lineage = Lineage::of(&graph).expect("a graph without cycles");
        let says = |settings: &Settings, warms_up, one_stage_a_device| {
            let schedules = Schedules { warms_up, one_stage_a_device };
            let lineage = lineage.as_ref();
            let of_any_cuts =
                hybrid::nothing_fits_with_any_cuts(&model, lineage, &cluster, settings, schedules, &control);
            let of_cuts = hybrid::nothing_fits(&model, &cluster, settings, schedules, &control);
            of_any_cuts
                .and_then(|of_any_cuts| Ok(of_cuts? || of_any_cuts))
                .map_err(|error| TestCaseError::fail(error.to_string()))
        };
        let nothing_fits = says(&settings, true, true)?;
        let has_plan = fits(&settings)?;
        prop_assert!(!(nothing_fits && has_plan), "a plan fits");
        infeasible.set(infeasible.get() + u32::from(!has_plan));
        shown.set(shown.get() + u32::from(nothing_fits));
        // In a step of one micro-batch a stage holds what it must under any schedule.
        let singles = settings.pipeline_micro_batch_sizes.iter().map(|&size| Settings {
            global_batch: size,
            pipeline_micro_batch_sizes: vec![size],
            ..settings.clone()
        });
        let any = singles.map(|single| fits(&single)).collect::<Result<Vec<bool>, _>>()?.contains(&true);
        for one_stage_a_device in [true, false] {
            prop_assert!(!(any && says(&settings, false, one_stage_a_device)?), "a plan fits {}", one_stage_a_device);
        }
        Ok(())
    });
    if let Err(error) = outcome {
        panic!("{error}");
    }
    let (infeasible, shown) = (infeasible.get(), shown.get());
    println!("{infeasible} questions without a plan, of which the conditions show {shown}");
    assert!(shown * 10 >= infeasible * 9, "{shown} of {infeasible}");
}

#[test]
fn a_search_without_a_limit_ends_by_itself_or_says_that_effort_ended_it() {
    holds(|judged| {
        let (_, _, answer) = judged.both()?;
        prop_assert!(matches!(answer.stopped, None | Some(Stopped::Effort)), "{:?}", answer.stopped);
        Ok(())
    });
}

/// Chains on several nodes, as small as the oracle needs them and as large as placements need them to differ.
fn questions_of_nodes() -> impl Strategy<Value = Question> {
    let shape = prop_oneof![Just((3, 2)), Just((4, 2)), Just((2, 3)), Just((4, 1))];
    let link = |bytes_per_s| {
        (bytes_per_s, prop_oneof![Just(0.0), 0.01..0.2]).prop_map(|(bytes_per_s, latency_s): (f64, f64)| Link {
            bytes_per_s,
            collective_bytes_per_s: bytes_per_s,
            latency_s,
        })
    };
    let cluster = (shape, link(100.0..1_000.0), link(5.0..100.0), 0..3_u32, prop_oneof![Just(1e9), 2_000.0..9_000.0]);
    (questions(), layers(3), cluster, prop_oneof![Just(4_u32), Just(8)]).prop_map(
        |(question, layers, ((nodes, devices), intra, inter, slow, memory_bytes), global_batch)| {
            let node = |index| Node { devices, memory_bytes, speed: if index < slow { 0.5 } else { 1.0 }, kind: 0 };
            let settings = Settings {
                global_batch,
                pipeline_micro_batch_sizes: vec![global_batch / 2, global_batch],
                recompute: vec![question.settings.recompute[0]],
                equal_replicas: false,
                ..question.settings
            };
            Question {
                graph: Graph { batch_sizes: vec![1], layers, edges: vec![(0, 1), (1, 2)], tied_weights: vec![] },
                cluster: Cluster { nodes: (0..nodes).map(node).collect(), intra, inter },
                settings,
            }
        },
    )
}

/// Shows `check` many questions on several nodes, each with what patterns and annealing make of it.
fn drafts(cases: u32, check: impl Fn(&Question, &LayerSums, Result<SearchResult, Error>) -> Result<(), TestCaseError>) {
    let config = Config { cases, failure_persistence: None, ..Config::default() };
    let mut runner = TestRunner::new_with_rng(config, TestRng::deterministic_rng(RngAlgorithm::ChaCha));
    let outcome = runner.run(&questions_of_nodes(), |question| {
        let model = LayerSums::new(&question.graph, &CutPoints::of(&question.graph, DEFAULT_BOUND).expect("a chain"));
        let draft = hybrid::draft(&model, &question.cluster, &question.settings, &Control::default());
        check(&question, &model, draft)
    });
    if let Err(error) = outcome {
        panic!("{error}");
    }
}

#[test]
fn a_draft_fits_and_uses_each_device_once() {
    drafts(40, |Question { cluster, settings, .. }, model, draft| {
        let Ok(SearchResult { plan, evaluated, .. }) = draft else { return Ok(()) };
        let mut devices: Vec<u32> = plan.devices(cluster).into_iter().flatten().collect();
        devices.sort_unstable();
        devices.dedup();
        prop_assert_eq!(devices.len() as u32, plan.stages.iter().map(StageCandidate::replicas).sum::<u32>());
        prop_assert!(devices.iter().all(|&device| device < cluster.devices()), "{:?}", plan);
        for (node, max) in (0..).zip(cluster.nodes.iter().map(|node| node.devices)) {
            let taken = plan.stages.iter().flat_map(|stage| &stage.footprint).filter(|(other, _)| *other == node);
            prop_assert!(taken.map(|(_, count)| count).sum::<u32>() <= max, "{:?}", plan);
        }
        prop_assert!(PlanEvaluator::fits(&evaluated.stages), "{:?}", plan);
        prop_assert!(evaluated.path_s <= evaluated.step_s * (1.0 + ROUNDING), "{} in {:?}", evaluated.path_s, plan);
        let again =
            PlanEvaluator::new(model, cluster, settings).evaluate(&plan).expect("a plan that was evaluated once");
        prop_assert_eq!(again.step_s.to_bits(), evaluated.step_s.to_bits());
        Ok(())
    });
}

#[test]
fn a_draft_is_the_same_on_one_thread_and_on_five() {
    let threads = |count| rayon::ThreadPoolBuilder::new().num_threads(count).build().expect("a few threads");
    let (one, five) = (threads(1), threads(5));
    drafts(6, |Question { cluster, settings, .. }, model, draft| {
        let ask = || hybrid::draft(model, cluster, settings, &Control::default()).map(|answer| answer.plan);
        let alone = one.install(ask);
        prop_assert_eq!(format!("{:?}", alone), format!("{:?}", five.install(ask)));
        prop_assert_eq!(format!("{:?}", alone), format!("{:?}", draft.map(|answer| answer.plan)));
        Ok(())
    });
}

#[test]
#[expect(clippy::print_stdout, reason = "figures for whoever runs it with `--nocapture`")]
fn a_draft_is_nearly_always_the_best_of_all_plans_on_several_nodes() {
    let (asked, missed) = (Cell::new(0), Cell::new(0));
    drafts(60, |Question { cluster, settings, .. }, model, draft| {
        let Ok((plan, best, _)) = hybrid::exhaustive(model, cluster, settings, &Control::default()) else {
            prop_assert!(draft.is_err(), "the oracle missed {:?}", draft);
            return Ok(());
        };
        asked.set(asked.get() + 1);
        let Ok(draft) = draft else {
            missed.set(missed.get() + 1);
            println!("missed {plan:?}");
            return Ok(());
        };
        let step_s = draft.evaluated.step_s;
        prop_assert!(step_s >= best.step_s * (1.0 - ROUNDING), "the oracle missed {:?}", draft.plan);
        if step_s > best.step_s * (1.0 + ROUNDING) {
            missed.set(missed.get() + 1);
            println!("{step_s} instead of {} by {plan:?}: {:?}", best.step_s, draft.plan);
        }
        Ok(())
    });
    let (asked, missed) = (asked.get(), missed.get());
    println!("{asked} questions, {missed} missed");
    assert!(missed * 20 <= asked, "{missed} of {asked} drafts were not the best plan");
}

#[test]
fn no_draft_is_made_once_nobody_waits_for_it() {
    let control = Control::default();
    control.cancel();
    drafts(10, |Question { cluster, settings, .. }, model, _| {
        let draft = hybrid::draft(model, cluster, settings, &control);
        prop_assert!(matches!(draft, Err(Error::Cancelled)), "{:?}", draft);
        Ok(())
    });
}
