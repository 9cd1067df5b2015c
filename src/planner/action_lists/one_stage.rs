//! Plans for schedules with one stage per device whose step the hybrid search can't compute: zero-bubble, overlapped
//! and sequential schedules.
//!
//! They run on all plans if these are few (`every_plan`). Then the shortest step is the optimum, and also the bound.
//! Otherwise they run on cuts that suit 1F1B: the best ones for each pipeline depth and each promising micro-batch size.
//! Each is simulated, and the shortest step that fits is the result. Other cuts may be better, so the bound is another
//! one: it holds for any order of the actions.

use crate::planner::effort::action_lists as effort;
use crate::planner::hybrid::{self, CandidatePlan, PlanEvaluator, Settings, StageCost, WarmUp};
use rayon::prelude::*;

use super::every_plan::every_plan;
use super::fit::run_under;
use super::run::Run;
use super::{Problem, SimulatedPlan, near_sizes};
use crate::control::Control;
use crate::error::Result;
use crate::schedule::{Family, Schedule};

/// Schedules that this module plans.
pub const ONE_STAGE: [&str; 5] = ["zb_h1", "zb_h2", "zb", "1f1b_overlap", SEQUENTIAL];
/// Schedules of this module that can run with one activation per stage, which is less than 1F1B needs.
pub const FRUGAL: [&str; 2] = ["zb", SEQUENTIAL];
/// Schedule that starts a micro-batch only after the one before it has ended.
pub(super) const SEQUENTIAL: &str = "sequential";

/// Relative margin between times that differ by the order of summation only.
const ROUNDING: f64 = 1.0 + 1e-9;

/// The stages of a plan of 1F1B, on which other schedules are run.
#[derive(Debug)]
pub(super) struct Cuts {
    plan: CandidatePlan,
    /// Costs of the stages, each with one micro-batch in flight.
    costs: Vec<StageCost>,
    micro_batches: u32,
    /// Lower bound on the step for every order of the passes: the work of some stage, after the forward passes and
    /// messages of one micro-batch in all stages before it.
    computing_s: f64,
}

impl Cuts {
    /// Evaluates the stages of a plan. `None` if a step has more actions than are simulated.
    fn of(problem: &Problem<'_>, evaluator: &mut PlanEvaluator<'_>, plan: CandidatePlan) -> Option<Self> {
        let micro_batches = problem.settings.global_batch / plan.micro_batch;
        // A split backward makes three actions per micro-batch and stage.
        if 3 * u64::from(micro_batches) * plan.stages.len() as u64 > effort::MAX_ACTIONS {
            return None;
        }
        let costs = evaluator.stages(&plan).ok()?;
        let (mut before_s, mut computing_s) = (0.0, 0.0_f64);
        for stage in &costs {
            computing_s = computing_s.max(before_s + f64::from(micro_batches) * (stage.forward_s + stage.backward_s));
            before_s += stage.forward_s + stage.transfer_s;
        }
        Some(Self { plan, costs, micro_batches, computing_s })
    }
}

/// Returns all plans of a problem, the lowest bound first, or `None` if there are too many.
pub(super) fn all(problem: &Problem<'_>) -> Option<Vec<Cuts>> {
    let mut found = distinct(problem, every_plan(problem)?.into_iter());
    found.sort_by(|a, b| a.computing_s.total_cmp(&b.computing_s));
    Some(found)
}

/// Returns the plans in `first`, and the best plans of 1F1B for each depth and each promising micro-batch size.
pub(super) fn cuts(problem: &Problem<'_>, first: &[CandidatePlan], near_size: u32, control: &Control) -> Vec<Cuts> {
    let settings = Settings { warm_up: WarmUp::Min, ..problem.settings.clone() };
    let each = near_sizes(&settings.pipeline_micro_batch_sizes, near_size)
        .into_iter()
        .map(|size| Settings { pipeline_micro_batch_sizes: vec![size], ..settings.clone() });
    let found = first.iter().cloned().chain(of_each_depth(problem, each.collect(), control));
    distinct(problem, found)
}

/// Returns the plans that need the least memory: the best ones with one micro-batch in flight, for the smallest sizes.
pub(super) fn sparest(problem: &Problem<'_>, control: &Control) -> Vec<Cuts> {
    let mut sizes = problem.settings.pipeline_micro_batch_sizes.clone();
    sizes.sort_unstable();
    sizes.retain(|&size| 3 * u64::from(problem.settings.global_batch / size) <= effort::MAX_ACTIONS);
    // With a global batch of one micro-batch, 1F1B keeps one activation per stage. That is the memory of the frugal
    // schedules.
    let single = |&size: &u32| Settings {
        global_batch: size,
        pipeline_micro_batch_sizes: vec![size],
        warm_up: WarmUp::Min,
        ..problem.settings.clone()
    };
    let each = sizes.iter().take(effort::MAX_SIZES).map(single).collect();
    distinct(problem, of_each_depth(problem, each, control).into_iter())
}

/// Returns the best plan for each of some settings and each promising depth, with each allowed value of recomputation.
fn of_each_depth(problem: &Problem<'_>, each: Vec<Settings>, control: &Control) -> Vec<CandidatePlan> {
    let devices = problem.cluster.devices();
    let layers = problem.model.layer_parameter_bytes.len() as u32;
    let max = problem.settings.max_stages.min(layers).min(devices);
    let mut depths: Vec<u32> = (0..32).map(|power| 1 << power).take_while(|&depth| depth <= max).collect();
    if devices <= max && !devices.is_power_of_two() {
        depths.push(devices);
    }
    let mut asked = Vec::new();
    for settings in each {
        for &depth in &depths {
            asked.extend(settings.recompute.iter().map(|&recompute| Settings {
                max_stages: depth,
                // With this limit, a plan of at most this depth can still use all devices, but not with fewer stages.
                max_replicas: devices.div_ceil(depth),
                recompute: vec![recompute],
                ..settings.clone()
            }));
        }
    }
    let found = asked.into_par_iter().map(|settings| {
        if control.should_stop() {
            return None;
        }
        hybrid::fitting(problem.model, problem.cluster, &settings, control).ok().map(|found| found.plan)
    });
    found.collect::<Vec<_>>().into_iter().flatten().collect()
}

/// Keeps the first plan of each set of stages, if a step is small enough to be simulated.
fn distinct(problem: &Problem<'_>, plans: impl Iterator<Item = CandidatePlan>) -> Vec<Cuts> {
    let mut seen = rustc_hash::FxHashSet::default();
    let mut evaluator = PlanEvaluator::new(problem.model, problem.cluster, problem.settings);
    plans
        .map(|plan| {
            // Other schedules have their own numbers in flight, so plans that differ only in these are equal here.
            let ones = vec![1; plan.stages.len()];
            plan.with_max_in_flights(&ones)
        })
        .filter(|plan| seen.insert(plan.clone()))
        .filter_map(|plan| Cuts::of(problem, &mut evaluator, plan))
        .collect()
}

/// Runs a schedule on each of these cuts. Returns the plan with the shortest step that fits, or else with the least
/// missing memory, and the number of simulated plans.
///
/// At least one plan is simulated, even after the deadline. `None` if `cuts` is empty.
pub(super) fn best(
    problem: &Problem<'_>,
    family: &Family,
    cuts: &[Cuts],
    control: &Control,
) -> Result<Option<(SimulatedPlan, u64)>> {
    let mut best: Option<(&Cuts, Schedule, Run)> = None;
    let mut simulated = 0;
    // Cuts run in chunks of fixed size. Inside a chunk all have to beat the same step, so the number of simulated plans
    // does not depend on the number of threads.
    for few in cuts.chunks(effort::CUTS_AT_ONCE) {
        if best.is_some() && control.should_stop() {
            break;
        }
        let shortest_s = best.iter().map(|(.., run)| run).filter(|run| run.fits()).map(|run| run.step_s);
        let shortest_s = shortest_s.fold(f64::INFINITY, f64::min);
        let runs = few.par_iter().enumerate().map(|(at, cuts)| {
            // A plan whose busiest stage computes longer than the best step can't be better.
            let is_worth = cuts.computing_s < shortest_s * ROUNDING && (at == 0 || !control.should_stop());
            let run = is_worth.then(|| {
                let ranks: Vec<u32> = (0..cuts.costs.len() as u32).collect();
                run_under(family, &cuts.costs, &ranks, cuts.micro_batches, cuts.plan.recompute)
            });
            run.transpose().map(|run| run.map(|(schedule, run)| (cuts, schedule, run)))
        });
        for found in runs.collect::<Result<Vec<_>>>()?.into_iter().flatten() {
            simulated += 1;
            if best.as_ref().is_none_or(|(.., best)| found.2.is_better_than(best)) {
                best = Some(found);
            }
        }
        if let Some((.., run)) = best.as_ref().filter(|(.., run)| run.fits()) {
            control.report(crate::control::Progress { best_s: run.step_s, lower_bound_s: 0.0 });
        }
    }
    Ok(best.map(|(cuts, schedule, run)| {
        let CandidatePlan { micro_batch, recompute, ref stages } = cuts.plan;
        let ends = stages.iter().map(|stage| (stage.begin, stage.end)).collect();
        (
            SimulatedPlan { micro_batch, recompute, ends, devices: cuts.plan.devices(problem.cluster), schedule, run },
            simulated,
        )
    }))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::cost::LayerSums;
    use crate::cost::network::{Cluster, Link, Node};
    use crate::model::graph::{Graph, Layer, Measurement};
    use crate::model::states::{CutPoints, DEFAULT_BOUND};
    use crate::planner::random_problems::settings;
    use crate::schedule::family;

    fn chain(forward_s: &[f64], activation_bytes: f64) -> Graph {
        let layer = |(at, &forward_s): (usize, &f64)| Layer {
            id: at.to_string(),
            name: at.to_string(),
            parameter_bytes: 1e6,
            measured: vec![Measurement {
                forward_s,
                backward_s: 2.0 * forward_s,
                halves_s: None,
                activation_bytes,
                saved_bytes: activation_bytes,
            }],
            ..Layer::default()
        };
        Graph {
            batch_sizes: vec![1],
            layers: forward_s.iter().enumerate().map(layer).collect(),
            edges: (1..forward_s.len()).map(|to| (to - 1, to)).collect(),
            tied_weights: Vec::new(),
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(16))]

        /// Checks that no plan that was left out, because its busiest stage computes too long, could have been the
        /// result.
        #[test]
        fn cuts_that_are_not_run_could_only_be_longer(
            forward_s in prop::collection::vec(0.5..2.0, 6),
            activation_bytes in prop_oneof![Just(0.0), Just(1e8), Just(1e9)],
            devices in prop_oneof![Just(4_u32), Just(6_u32)],
            name in prop::sample::select(&ONE_STAGE),
        ) {
            let graph = chain(&forward_s, activation_bytes);
            let states = CutPoints::of(&graph, DEFAULT_BOUND).unwrap();
            let model = LayerSums::new(&graph, &states);
            let link = Link { bytes_per_s: 1e9, collective_bytes_per_s: 1e9, latency_s: 0.0 };
            let node = Node { devices: 1, memory_bytes: 64e9, speed: 1.0 };
            let cluster = Cluster { nodes: vec![node; devices as usize], intra: link, inter: link };
            let settings = settings(24, vec![1, 2, 3, 4, 6, 8, 12, 24]);
            let problem = Problem { model: &model, cluster: &cluster, settings: &settings };
            let control = Control::default();
            let mut cuts = cuts(&problem, &[], 4, &control);
            prop_assert!(cuts.len() > effort::CUTS_AT_ONCE);
            let family = family(name).unwrap();
            let (best, _) = super::best(&problem, family, &cuts, &control).unwrap().unwrap();
            for cuts in &mut cuts {
                cuts.computing_s = 0.0;
            }
            let (thorough, simulated) = super::best(&problem, family, &cuts, &control).unwrap().unwrap();
            prop_assert_eq!(simulated as usize, cuts.len());
            prop_assert_eq!(best.run, thorough.run);
            prop_assert_eq!(best.ends, thorough.ends);
        }
    }
}
