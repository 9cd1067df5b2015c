//! Plans for schedules with one stage per device whose step the hybrid search can't compute: zero-bubble, overlapped
//! and sequential schedules.
//!
//! They run on all plans if these are few (`every_plan`). Then the shortest step is the optimum, and also the bound.
//! Otherwise they run on cuts that suit 1F1B: the best ones for each pipeline depth and each promising micro-batch size.
//! The bound then is another one, which holds for any order of the actions (`bound`). It also gives promising plans.
//! Local search improves the best plan of all (`local_search`).

use crate::planner::effort::action_lists as effort;
use crate::planner::hybrid::{
    self, AnyOrder, CandidatePlan, PlanEvaluator, Recompute, Row, Settings, StageCandidate, StageCost, WarmUp,
};
use rayon::prelude::*;

use super::bound::{any_order, one_stage_bound};
use super::every_plan::every_plan;
use super::fit::run_under;
use super::local_search::improve;
use super::run::{Run, SMALLER};
use super::{Problem, SimulatedPlan, near_sizes};
use crate::control::{Control, Progress};
use crate::error::Result;
use crate::schedule::{Family, Schedule};

/// Schedules that this module plans.
pub const ONE_STAGE: [&str; 5] = ["zb_h1", "zb_h2", "zb", "1f1b_overlap", SEQUENTIAL];
/// Schedules of this module that can run with one activation per stage, which is less than 1F1B needs.
pub const FRUGAL: [&str; 2] = ["zb", SEQUENTIAL];
/// Schedule that starts a micro-batch only after the one before it has ended.
pub(super) const SEQUENTIAL: &str = "sequential";

/// The stages of a plan, on which schedules are run.
#[derive(Debug)]
pub(super) struct Cuts {
    plan: CandidatePlan,
    /// Costs of the stages, each with one micro-batch in flight.
    costs: Vec<StageCost>,
    micro_batches: u32,
}

/// A plan that was run under a schedule.
#[derive(Debug, Clone)]
pub(super) struct Ran {
    pub(super) plan: CandidatePlan,
    pub(super) schedule: Schedule,
    pub(super) run: Run,
}

impl Cuts {
    /// Evaluates the stages of a plan. `None` if a step has more actions than are simulated.
    pub(super) fn of(problem: &Problem<'_>, evaluator: &mut PlanEvaluator<'_>, plan: CandidatePlan) -> Option<Self> {
        let micro_batches = problem.settings.global_batch / plan.micro_batch;
        let cuts = Self { plan, costs: Vec::new(), micro_batches };
        if cuts.actions() > effort::MAX_ACTIONS {
            return None;
        }
        Some(Self { costs: evaluator.stages(&cuts.plan).ok()?, ..cuts })
    }

    /// Evaluates another plan like [`Cuts::of`]. Stages that both plans have keep their costs.
    pub(super) fn changed(&self, evaluator: &mut PlanEvaluator<'_>, plan: CandidatePlan) -> Option<Self> {
        let micro_batches = self.micro_batches * self.plan.micro_batch / plan.micro_batch;
        let cuts = Self { plan, costs: Vec::new(), micro_batches };
        if cuts.actions() > effort::MAX_ACTIONS {
            return None;
        }
        Some(Self { costs: evaluator.stages_but(&cuts.plan, (&self.plan, &self.costs)).ok()?, ..cuts })
    }

    /// Returns the number of actions of a step. A split backward makes three actions per micro-batch and stage.
    pub(super) fn actions(&self) -> u64 {
        3 * u64::from(self.micro_batches) * self.plan.stages.len() as u64
    }

    /// Returns a lower bound on the step for every order of the passes.
    pub(super) fn min_step_s(&self, order: AnyOrder) -> f64 {
        order.min_step_s(&self.costs, self.micro_batches)
    }

    /// Runs the stages under a schedule.
    pub(super) fn run_under(&self, family: &Family) -> Result<Ran> {
        let ranks: Vec<u32> = (0..self.costs.len() as u32).collect();
        let (schedule, run) = run_under(family, &self.costs, &ranks, self.micro_batches)?;
        Ok(Ran { plan: self.plan.clone(), schedule, run })
    }
}

/// Returns all plans of a problem, the lowest bound first, or `None` if there are too many.
pub(super) fn all(problem: &Problem<'_>) -> Option<Vec<Cuts>> {
    let mut found = distinct(problem, every_plan(problem)?.into_iter());
    // The bound for split backwards holds for all schedules.
    let order = AnyOrder { splits_backward: true, is_sequential: false };
    found.sort_by(|a, b| a.min_step_s(order).total_cmp(&b.min_step_s(order)));
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

/// Returns the best plan for each of some settings and each promising depth, with each allowed choice of recomputation.
fn of_each_depth(problem: &Problem<'_>, each: Vec<Settings>, control: &Control) -> Vec<CandidatePlan> {
    let devices = problem.cluster.devices();
    let layers = problem.model.layer_parameter_bytes.len() as u32;
    let max = problem.settings.max_stages.min(layers).min(devices);
    let mut depths: Vec<u32> = (0..32).map(|power| 1 << power).take_while(|&depth| depth <= max).collect();
    if devices <= max && !devices.is_power_of_two() {
        depths.push(devices);
    }
    let mut choices = problem.settings.recompute.clone();
    // A schedule may need more memory than 1F1B, which decides by stage.
    if choices.contains(&Recompute::ByStage) {
        choices.push(Recompute::Always);
    }
    let mut asked = Vec::new();
    for settings in each {
        for &depth in &depths {
            asked.extend(choices.iter().map(|&recompute| Settings {
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

/// Result of the search for a schedule.
#[derive(Debug)]
pub(super) struct Searched {
    pub(super) best: Ran,
    /// Lower bound on the step of every plan. `None` if none fits.
    pub(super) lower_bound_s: Option<f64>,
    /// Number of plans that were simulated.
    pub(super) simulated: u64,
}

/// Searches the best plan for a schedule, from these cuts. `is_all` states that they are the cuts of every plan.
///
/// `None` if `cuts` is empty.
pub(super) fn search(
    problem: &Problem<'_>,
    family: &Family,
    (cuts, is_all): (&[Cuts], bool),
    control: &Control,
) -> Result<Option<Searched>> {
    let Some((best, mut simulated)) = best(family, cuts, None, control)? else { return Ok(None) };
    if is_all {
        let is_proven = best.run.fits() && !control.should_stop();
        let lower_bound_s = is_proven.then_some(best.run.step_s);
        return Ok(Some(Searched { best, lower_bound_s, simulated }));
    }
    let (mut lower_bound_s, mut promising) = (None, Vec::new());
    if best.run.fits() {
        let bound = one_stage_bound(problem, family, best.run.step_s, control);
        let plans = bound.rows.into_iter().rev().map(|(size, recompute, row)| placed(problem, size, recompute, &row));
        promising = distinct(problem, plans);
        let min_s = |cuts: &Cuts| cuts.min_step_s(any_order(family));
        promising.sort_by(|a, b| min_s(a).total_cmp(&min_s(b)));
        promising.truncate(effort::PROMISING_ROWS);
        lower_bound_s = Some(bound.lower_bound_s);
    }
    let (best, count) = improve(problem, family, (best, &promising), lower_bound_s.unwrap_or(0.0), control)?;
    simulated += count;
    if best.run.fits() && lower_bound_s.is_none() {
        lower_bound_s = Some(one_stage_bound(problem, family, best.run.step_s, control).lower_bound_s);
    }
    if let Some(lower_bound_s) = lower_bound_s {
        control.report(Progress { best_s: best.run.step_s, lower_bound_s });
    }
    Ok(Some(Searched { best, lower_bound_s, simulated }))
}

/// Returns a plan with these stages, which take devices node by node, from the fastest node to the slowest.
fn placed(problem: &Problem<'_>, micro_batch: u32, recompute: bool, row: &Row) -> CandidatePlan {
    let nodes = &problem.cluster.nodes;
    let mut free: Vec<(u32, u32)> = (0_u32..).zip(nodes.iter().map(|node| node.devices)).collect();
    free.sort_by(|a, b| nodes[b.0 as usize].speed.total_cmp(&nodes[a.0 as usize].speed));
    let mut free = free.into_iter().peekable();
    let mut take = |mut replicas: u32| {
        let mut footprint = Vec::new();
        while let Some((node, left)) = free.peek_mut().filter(|_| replicas > 0) {
            let taken = replicas.min(*left);
            footprint.push((*node, taken));
            (replicas, *left) = (replicas - taken, *left - taken);
            if *left == 0 {
                free.next();
            }
        }
        footprint.sort_unstable();
        footprint
    };
    let stages = row.iter().map(|&(begin, end, replicas)| StageCandidate {
        begin,
        end,
        footprint: take(replicas),
        max_in_flight: 1,
        recompute,
    });
    CandidatePlan { micro_batch, stages: stages.collect() }
}

/// Runs a schedule on each of these cuts. Returns the plan with the shortest step that fits, or else with the least
/// missing memory, and the number of simulated plans. It is `known` if no other plan is better.
///
/// At least one plan is simulated, even after the deadline. `None` if `cuts` is empty and no plan is known.
pub(super) fn best(
    family: &Family,
    cuts: &[Cuts],
    known: Option<Ran>,
    control: &Control,
) -> Result<Option<(Ran, u64)>> {
    let mut best = known;
    let mut simulated = 0;
    // Cuts run in chunks of fixed size. Inside a chunk all have to beat the same step, so the number of simulated plans
    // does not depend on the number of threads.
    for few in cuts.chunks(effort::CUTS_AT_ONCE) {
        if best.is_some() && control.should_stop() {
            break;
        }
        let shortest_s = best.iter().map(|best| &best.run).filter(|run| run.fits()).map(|run| run.step_s);
        let shortest_s = shortest_s.fold(f64::INFINITY, f64::min);
        let runs = few.par_iter().enumerate().map(|(at, cuts)| {
            // A plan that takes longer than the best step in any order can't be better.
            let is_worth = cuts.min_step_s(any_order(family)) < shortest_s * (1.0 + SMALLER)
                && (at == 0 || !control.should_stop());
            is_worth.then(|| cuts.run_under(family)).transpose()
        });
        for found in runs.collect::<Result<Vec<_>>>()?.into_iter().flatten() {
            simulated += 1;
            if best.as_ref().is_none_or(|best| found.run.is_better_than(&best.run)) {
                best = Some(found);
            }
        }
        if let Some(best) = best.as_ref().filter(|best| best.run.fits()) {
            control.report(Progress { best_s: best.run.step_s, lower_bound_s: 0.0 });
        }
    }
    Ok(best.map(|best| (best, simulated)))
}

impl Ran {
    /// Returns the plan with the numbers of its devices.
    pub(super) fn into_plan(self, problem: &Problem<'_>) -> SimulatedPlan {
        let devices = self.plan.devices(problem.cluster);
        let CandidatePlan { micro_batch, stages } = self.plan;
        let ends = stages.iter().map(|stage| (stage.begin, stage.end)).collect();
        SimulatedPlan { micro_batch, ends, devices, schedule: self.schedule, run: self.run }
    }
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
            let node = Node { devices: 1, memory_bytes: 64e9, speed: 1.0, kind: 0 };
            let cluster = Cluster { nodes: vec![node; devices as usize], intra: link, inter: link };
            let settings = settings(24, vec![1, 2, 3, 4, 6, 8, 12, 24]);
            let problem = Problem { model: &model, cluster: &cluster, settings: &settings };
            let control = Control::default();
            let cuts = cuts(&problem, &[], 4, &control);
            prop_assert!(cuts.len() > effort::CUTS_AT_ONCE);
            let family = family(name).unwrap();
            let (best, _) = super::best(family, &cuts, None, &control).unwrap().unwrap();
            let all = cuts.iter().map(|cuts| cuts.run_under(family).unwrap());
            let thorough = all.reduce(|best, other| if other.run.is_better_than(&best.run) { other } else { best });
            let thorough = thorough.unwrap();
            prop_assert_eq!(best.run, thorough.run);
            prop_assert_eq!(best.plan, thorough.plan);
        }
    }
}
