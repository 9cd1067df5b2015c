//! Compares the fast simulation of 1F1B, eager 1F1B and GPipe with the simulation of arbitrary schedules.
//!
//! Plans of these three schedules are evaluated without a list of actions (`hybrid`). Plans of all other schedules are
//! lists of actions that are simulated one by one, with memory counted at every moment (`action_lists`). Both must give
//! the same step, the same costs of each stage and the same memory, to the last digit.

use proptest::prelude::*;

use super::action_lists;
use super::hybrid::{self, CandidatePlan, EvaluatedPlan, Settings, WarmUp};
use super::random_problems::{RandomProblem, problems};
use crate::cost::LayerSums;
use crate::model::graph::{Graph, TiedWeight};
use crate::model::states::CutPoints;
use crate::schedule::{Request, Schedule, eager_in_flight, family, one_f_one_b, one_f_one_b_in_flight};

/// Returns the devices of each stage, in the order of the cluster, or `None` if the cluster has too few.
fn devices_of_stages(devices: u32, replicas: &[u32]) -> Option<Vec<Vec<u32>>> {
    let ends = replicas.iter().scan(0, |end, &count| {
        *end += count;
        Some((*end - count, *end))
    });
    let stages: Vec<Vec<u32>> = ends.map(|(begin, end)| (begin..end).collect()).collect();
    (replicas.iter().sum::<u32>() <= devices).then_some(stages)
}

/// Splits the layers of a chain into `count` stages with about equal numbers of layers.
fn even_stages(graph: &Graph, count: usize) -> Vec<Vec<usize>> {
    let layers = graph.layers.len();
    (0..count).map(|stage| (layers * stage / count..layers * (stage + 1) / count).collect()).collect()
}

/// Checks that a plan has the same step, costs and memory if its stages run the actions of `schedule` one by one.
fn agrees(
    problem: (&LayerSums, &RandomProblem, &Settings),
    devices: &[Vec<u32>],
    (plan, evaluated): (CandidatePlan, EvaluatedPlan),
    schedule: &Schedule,
) -> Result<(), TestCaseError> {
    let (model, RandomProblem { cluster, .. }, settings) = problem;
    let recompute = plan.stages.iter().map(|stage| stage.recompute).collect();
    let (_, run) = action_lists::evaluate(model, cluster, settings, devices, schedule, recompute)
        .expect("limits in flight never grow");
    prop_assert_eq!(Some(run.step_s), Some(evaluated.step_s), "the step under {:?} of {:?}", settings.warm_up, plan);
    let max_in_flights: Vec<u32> = plan.stages.iter().map(|stage| stage.max_in_flight).collect();
    prop_assert_eq!(&run.in_flight, &max_in_flights);
    for (stage, (all, fast)) in run.stages.iter().zip(&evaluated.stages).enumerate() {
        prop_assert_eq!(all, fast, "the cost and memory of stage {} of {:?}", stage, plan);
        // At exactly full memory the two sums may round to different sides of the capacity, so skip these cases.
    }
    let fits = hybrid::PlanEvaluator::fits(&evaluated.stages);
    let is_full = evaluated.stages.iter().any(|stage| {
        let (held, capacity) = (stage.memory.total_bytes(), stage.capacity_bytes);
        (held - capacity).abs() <= 1e-9 * capacity
    });
    prop_assert!(is_full || run.fits() == fits, "{run:?} and {fits}");
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 5_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_fast_simulation_of_a_plan_is_that_of_all_orders(
        mut problem in problems(),
        warm_up in prop_oneof![Just(WarmUp::Min), Just(WarmUp::Eager), Just(WarmUp::All)],
        micro_batch in prop_oneof![Just(1_u32), Just(2), Just(3), Just(6)],
        tied in prop::option::of((0_usize..7, 0_usize..7)),
        zero_stage in 0_u8..2,
    ) {
        let layers = problem.graph.layers.len();
        if let Some((one, other)) = tied
            && one < other
            && other < layers
        {
            let bytes = problem.graph.layers[one].trained_bytes();
            problem.graph.tied_weights.push(TiedWeight { layers: vec![one, other], bytes });
        }
        let count = problem.replicas.len().min(layers);
        let Some(devices) = devices_of_stages(problem.cluster.devices(), &problem.replicas[..count]) else {
            return Ok(());
        };
        let mut settings = Settings { warm_up, pipeline_micro_batch_sizes: vec![micro_batch], ..problem.settings.clone() };
        settings.memory = settings.memory.at_zero_stage(zero_stage);
        let states = CutPoints::between(&problem.graph, &even_stages(&problem.graph, count)).expect("a chain");
        let model = LayerSums::new(&problem.graph, &states);
        // The largest numbers in flight that memory allows. Skip problems with too many replicas for the micro-batch.
        let Ok(found) = hybrid::evaluate(&model, &problem.cluster, &settings, &devices) else { return Ok(()) };
        let (stages, micro_batches) = (count as u32, settings.global_batch / micro_batch);
        let max_in_flights: Vec<u32> = found.0.stages.iter().map(|stage| stage.max_in_flight).collect();
        let recompute: Vec<bool> = found.0.stages.iter().map(|stage| stage.recompute).collect();
        let asked = (&model, &problem, &settings);
        agrees(asked, &devices, found, &one_f_one_b(&max_in_flights, micro_batches))?;
        // The schedules of these names in the registry, even if they do not fit in memory.
        let (name, max_in_flights) = match warm_up {
            WarmUp::Min => ("1f1b", one_f_one_b_in_flight(stages, micro_batches, u32::MAX)),
            WarmUp::Eager => ("eager_1f1b", eager_in_flight(stages, micro_batches, u32::MAX)),
            WarmUp::All => ("gpipe", vec![micro_batches; count]),
        };
        let schedule = family(name).and_then(|family| family.build(&Request::new(stages, micro_batches)));
        let found = hybrid::evaluate_in_flight(&model, &problem.cluster, &settings, &devices, &max_in_flights, &recompute).expect("it was costed");
        agrees(asked, &devices, found, &schedule.expect("any number of stages"))?;
    }
}
