//! Local search for schedules with one stage per device: small changes of a plan, each run under the schedule itself.
//!
//! The start is the best of plans that suit 1F1B, so the answer is never worse than these. In each turn, the neighbors
//! of the plan are evaluated, and the most promising ones are run until one of them is better. A neighbor whose bound
//! for any order of actions reaches the best step is not run. Work is counted in actions, and there are no random
//! numbers, so the answer is the same on every machine.

use crate::planner::effort::action_lists as effort;
use crate::planner::hybrid::{CandidatePlan, PlanEvaluator, Recompute, StageCandidate};
use rustc_hash::FxHashSet;

use super::Problem;
use super::bound::any_order;
use super::one_stage::{self, Cuts, Ran};
use super::run::SMALLER;
use crate::control::Control;
use crate::error::Result;
use crate::schedule::{Family, family};

/// Schedules with fixed orders that stand for one that is fitted to times, whose runs take much longer.
const STAND_INS: [&str; 2] = ["zb_h1", "zb_h2"];

/// Returns the best plan that is found from `best` or a promising plan within a fixed number of actions, and the number
/// of plans that were run. No plan is shorter than `bound_s`.
pub(super) fn improve(
    problem: &Problem<'_>,
    own: &Family,
    (best, promising): (Ran, &[Cuts]),
    bound_s: f64,
    control: &Control,
) -> Result<(Ran, u64)> {
    let mut search = LocalSearch {
        problem,
        evaluator: PlanEvaluator::new(problem.model, problem.cluster, problem.settings),
        bound_s,
        control,
        simulated: 0,
    };
    if !own.options.contains(&"durations") {
        return Ok((search.climb(own, best, promising)?, search.simulated));
    }
    let start = best.plan.clone();
    let mut best = best;
    for name in STAND_INS {
        let other = family(name)?;
        let Some(cuts) = search.cuts(start.clone()).filter(|_| !search.is_done(&best)) else { break };
        let ran = cuts.run_under(other)?;
        // A stand-in that lacks memory would lead to plans with less memory instead of a shorter step.
        if !ran.run.fits() {
            continue;
        }
        let found = search.climb(other, ran, promising)?;
        if found.plan != start
            && let Some(cuts) = search.cuts(found.plan)
        {
            search.simulated += 1;
            let found = cuts.run_under(own)?;
            best = if found.run.is_clearly_better_than(&best.run) { found } else { best };
        }
    }
    Ok((best, search.simulated))
}

/// State of the search.
struct LocalSearch<'a> {
    problem: &'a Problem<'a>,
    evaluator: PlanEvaluator<'a>,
    /// Lower bound on the step of every plan.
    bound_s: f64,
    control: &'a Control,
    /// Number of plans that were run.
    simulated: u64,
}

impl LocalSearch<'_> {
    /// Replaces the best of some plans by a better neighbor until there is none, or until the actions are used up.
    fn climb(&mut self, family: &Family, start: Ran, promising: &[Cuts]) -> Result<Ran> {
        let mut best = start;
        if let Some((found, count)) = one_stage::best(family, promising, Some(best.clone()), self.control)? {
            self.simulated += count;
            best = found;
        }
        let mut seen: FxHashSet<CandidatePlan> = FxHashSet::default();
        seen.insert(best.plan.clone());
        let mut left = effort::LOCAL_SEARCH_ACTIONS;
        while !self.is_done(&best) {
            let Some(now) = self.cuts(best.plan.clone()) else { break };
            let mut neighbors: Vec<(f64, Cuts)> = Vec::new();
            for plan in changes(self.problem, &best.plan) {
                if left == 0 || self.control.should_stop() {
                    break;
                }
                if is_allowed(self.problem, &plan) && seen.insert(plan.clone()) {
                    left = left.saturating_sub(effort::EVALUATION_ACTIONS);
                    let cuts = now.changed(&mut self.evaluator, plan);
                    neighbors.extend(cuts.map(|cuts| (cuts.min_step_s(any_order(family)), cuts)));
                }
            }
            // A stable sort keeps the order of changes among equal bounds.
            neighbors.sort_by(|a, b| a.0.total_cmp(&b.0));
            let mut better: Option<Ran> = None;
            for (min_s, cuts) in &neighbors {
                let is_worth = !best.run.fits() || *min_s < best.run.step_s * (1.0 - SMALLER);
                if left == 0 || !is_worth || self.control.should_stop() {
                    break;
                }
                left = left.saturating_sub(cuts.actions());
                self.simulated += 1;
                let found = cuts.run_under(family)?;
                if found.run.is_clearly_better_than(&best.run) {
                    better = Some(found);
                    break;
                }
            }
            match better {
                Some(found) => best = found,
                None => break,
            }
        }
        Ok(best)
    }

    fn cuts(&mut self, plan: CandidatePlan) -> Option<Cuts> {
        Cuts::of(self.problem, &mut self.evaluator, plan)
    }

    /// Returns whether no plan can be better.
    fn is_done(&self, best: &Ran) -> bool {
        self.control.should_stop() || (best.run.fits() && best.run.step_s <= self.bound_s * (1.0 + SMALLER))
    }
}

/// Returns whether the stages of a plan can share its micro-batch and are not too many.
fn is_allowed(problem: &Problem<'_>, plan: &CandidatePlan) -> bool {
    let settings = problem.settings;
    plan.stages.len() as u32 <= settings.max_stages
        && plan.stages.iter().all(|stage| settings.samples_per_replica(plan.micro_batch, stage.replicas()).is_some())
        && (!settings.equal_replicas || plan.stages.windows(2).all(|two| two[0].replicas() == two[1].replicas()))
}

/// Returns the plans that differ from `plan` in one decision: a border, a device, the devices of two stages, the
/// micro-batch size, recomputation, or the number of stages.
fn changes(problem: &Problem<'_>, plan: &CandidatePlan) -> Vec<CandidatePlan> {
    let settings = problem.settings;
    let mut plans = Vec::new();
    for recompute in settings.uniform_recompute() {
        if plan.stages.iter().any(|stage| stage.recompute != recompute) {
            plans.push(plan.clone().with_recompute(Recompute::uniform(recompute)));
        }
    }
    let sizes = &settings.pipeline_micro_batch_sizes;
    let smaller = sizes.iter().copied().filter(|&size| size < plan.micro_batch).max();
    let larger = sizes.iter().copied().filter(|&size| size > plan.micro_batch).min();
    for micro_batch in smaller.into_iter().chain(larger) {
        plans.push(CandidatePlan { micro_batch, ..plan.clone() });
    }
    let free = free_devices(problem, plan);
    let is_mixed = problem.cluster.nodes.windows(2).any(|two| two[0] != two[1]);
    for stage in 0..plan.stages.len() {
        if settings.recompute.contains(&Recompute::ByStage) {
            let mut other = plan.clone();
            other.stages[stage].recompute = !other.stages[stage].recompute;
            plans.push(other);
        }
        // An idle device joins a stage.
        for &(node, _) in &free {
            let mut other = plan.clone();
            add(&mut other.stages[stage].footprint, node, 1);
            plans.push(other);
        }
        plans.extend(replaced(plan, stage, &free));
        plans.extend(halves(problem, plan, stage));
        if stage + 1 == plan.stages.len() {
            continue;
        }
        plans.push(merged(plan, stage));
        plans.extend(effort::STRIDES.iter().filter_map(|&by| shifted(problem, plan, stage, by)));
        if plan.stages[stage].footprint != plan.stages[stage + 1].footprint {
            plans.push(swapped(plan, stage, stage + 1));
        }
        // Where nodes differ, each pair of stages may suit the other's devices. These are too many in a deep pipeline.
        if is_mixed && plan.stages.len() <= effort::SWAPPED_STAGES {
            plans.extend((stage + 2..plan.stages.len()).map(|other| swapped(plan, stage, other)));
        }
        for (from, to) in [(stage, stage + 1), (stage + 1, stage)] {
            for moved in handed_over(plan, from, to) {
                // The stage with one more device also gets layers, or it would only wait longer.
                let toward = if from < to { -1 } else { 1 };
                plans.extend(effort::FOLLOWING.iter().filter_map(|by| shifted(problem, &moved, stage, toward * by)));
                plans.push(moved);
            }
        }
    }
    plans
}

/// Returns the nodes with devices that no stage uses, and the number of these.
fn free_devices(problem: &Problem<'_>, plan: &CandidatePlan) -> Vec<(u32, u32)> {
    let mut free: Vec<(u32, u32)> = (0_u32..).zip(problem.cluster.nodes.iter().map(|node| node.devices)).collect();
    for &(node, count) in plan.stages.iter().flat_map(|stage| &stage.footprint) {
        free[node as usize].1 -= count;
    }
    free.retain(|&(_, count)| count > 0);
    // Devices of equal nodes with equally many of them idle differ only in the links, so one node stands for all.
    free.dedup_by_key(|&mut (node, count)| {
        let node = problem.cluster.nodes[node as usize];
        (node.speed.to_bits(), node.kind, count)
    });
    free
}

/// Adds devices of a node to a footprint.
fn add(footprint: &mut Vec<(u32, u32)>, node: u32, count: u32) {
    match footprint.binary_search_by_key(&node, |&(node, _)| node) {
        Ok(at) => footprint[at].1 += count,
        Err(at) => footprint.insert(at, (node, count)),
    }
}

/// Returns the plans in which one device moves from a stage to another, one for each node of the first.
fn handed_over(plan: &CandidatePlan, from: usize, to: usize) -> Vec<CandidatePlan> {
    if plan.stages[from].replicas() < 2 {
        return Vec::new();
    }
    let move_one = |at: usize| {
        let mut other = plan.clone();
        let (node, count) = &mut other.stages[from].footprint[at];
        let node = *node;
        *count -= 1;
        other.stages[from].footprint.retain(|&(_, count)| count > 0);
        add(&mut other.stages[to].footprint, node, 1);
        other
    };
    (0..plan.stages[from].footprint.len().min(effort::MOVED_FROM)).map(move_one).collect()
}

/// Returns the plan in which two stages swap all devices.
fn swapped(plan: &CandidatePlan, one: usize, other: usize) -> CandidatePlan {
    let mut plan = plan.clone();
    let footprint = std::mem::take(&mut plan.stages[one].footprint);
    plan.stages[one].footprint = std::mem::replace(&mut plan.stages[other].footprint, footprint);
    plan
}

/// Returns the plans in which idle devices of another node replace as many devices of a stage on one node, and the
/// plans in which a stage loses a device.
fn replaced(plan: &CandidatePlan, stage: usize, free: &[(u32, u32)]) -> Vec<CandidatePlan> {
    let footprint = &plan.stages[stage].footprint;
    let mut plans = Vec::new();
    for &(node, count) in footprint.iter().take(effort::MOVED_FROM) {
        let mut without = |removed: u32, added: Option<u32>| {
            let mut footprint: Vec<(u32, u32)> = footprint.clone();
            footprint.iter_mut().filter(|held| held.0 == node).for_each(|held| held.1 -= removed);
            footprint.retain(|&(_, count)| count > 0);
            if let Some(other) = added {
                add(&mut footprint, other, removed);
            }
            if !footprint.is_empty() {
                let mut other = plan.clone();
                other.stages[stage].footprint = footprint;
                plans.push(other);
            }
        };
        without(1, None);
        for &(other, idle) in free.iter().filter(|free| free.0 != node) {
            without(count.min(idle), Some(other));
        }
    }
    plans
}

/// Returns the plan whose border behind a stage moves by a number of cuts, if both stages keep layers.
fn shifted(problem: &Problem<'_>, plan: &CandidatePlan, stage: usize, by: isize) -> Option<CandidatePlan> {
    let model = problem.model;
    let (begin, cut, end) = (plan.stages[stage].begin, plan.stages[stage].end, plan.stages[stage + 1].end);
    // `begins_behind` counts from the largest cut down.
    let at = model.begins_behind(end, cut).checked_add_signed(-by)?;
    let other = model.begin_at(end, at)? as usize;
    if other == cut || !model.is_inside(begin, other) {
        return None;
    }
    let mut plan = plan.clone();
    plan.stages[stage].end = other;
    plan.stages[stage + 1].begin = other;
    Some(plan)
}

/// Returns the plan in which a stage and the next one are a single stage on the devices of both.
fn merged(plan: &CandidatePlan, stage: usize) -> CandidatePlan {
    let mut plan = plan.clone();
    let next = plan.stages.remove(stage + 1);
    let whole = &mut plan.stages[stage];
    whole.end = next.end;
    next.footprint.iter().for_each(|&(node, count)| add(&mut whole.footprint, node, count));
    plan
}

/// Returns the plan in which a stage is two stages, with half of its devices and about half of its work each.
fn halves(problem: &Problem<'_>, plan: &CandidatePlan, stage: usize) -> Option<CandidatePlan> {
    let model = problem.model;
    let StageCandidate { begin, end, ref footprint, recompute, .. } = plan.stages[stage];
    let mut left = plan.stages[stage].replicas() / 2;
    if left == 0 {
        return None;
    }
    let (mut first, mut second) = (Vec::new(), Vec::new());
    for &(node, count) in footprint {
        let taken = left.min(count);
        left -= taken;
        first.extend((taken > 0).then_some((node, taken)));
        second.extend((count > taken).then_some((node, count - taken)));
    }
    let middle = model.layers_below(begin).midpoint(model.layers_below(end));
    let inside = model.begins(end).map(|cut| cut as usize).filter(|&cut| model.is_inside(begin, cut));
    let cut = inside.min_by_key(|&cut| model.layers_below(cut).abs_diff(middle))?;
    let mut plan = plan.clone();
    plan.stages[stage] = StageCandidate { begin: cut, end, footprint: second, max_in_flight: 1, recompute };
    plan.stages.insert(stage, StageCandidate { begin, end: cut, footprint: first, max_in_flight: 1, recompute });
    Some(plan)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::ONE_STAGE;
    use super::*;
    use crate::cost::LayerSums;
    use crate::model::states::{CutPoints, DEFAULT_BOUND};
    use crate::planner::random_problems::{RandomProblem, branching, problems};

    /// Checks an answer against all plans and against its start. Returns whether its step is the shortest of all plans,
    /// or `None` if no plan fits.
    fn found(problem: &RandomProblem, family: &Family) -> std::result::Result<Option<bool>, TestCaseError> {
        let states = CutPoints::of(&problem.graph, DEFAULT_BOUND).unwrap();
        let model = LayerSums::new(&problem.graph, &states);
        let problem = Problem { model: &model, cluster: &problem.cluster, settings: &problem.settings };
        let control = Control::default();
        let Some(all) = one_stage::all(&problem) else { return Ok(None) };
        let Some(best) = one_stage::search(&problem, family, (&all, true), &control).unwrap() else { return Ok(None) };
        let starts = one_stage::cuts(&problem, &[], 2, &control);
        let Some(start) = one_stage::best(family, &starts, None, &control).unwrap() else { return Ok(None) };
        let Some(found) = one_stage::search(&problem, family, (&starts, false), &control).unwrap() else {
            return Ok(None);
        };
        prop_assert!(!found.best.run.is_clearly_better_than(&best.best.run), "better than all plans");
        prop_assert!(!start.0.run.is_clearly_better_than(&found.best.run), "worse than its start");
        let (shortest_s, step_s) = (best.best.run.step_s, found.best.run.step_s);
        if found.best.run.fits() {
            prop_assert!(found.lower_bound_s.unwrap() <= shortest_s * (1.0 + 1e-9));
        }
        // Every stage has a device, and no device is in two stages.
        let mut devices = found.best.into_plan(&problem).devices.concat();
        devices.sort_unstable();
        let used = devices.len();
        devices.dedup();
        prop_assert_eq!(used, devices.len());
        prop_assert!(devices.iter().all(|&device| device < problem.cluster.devices()));
        Ok(best.best.run.fits().then_some(step_s <= shortest_s * (1.0 + 1e-9)))
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 100, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn the_answer_is_between_all_plans_and_the_start(
            problem in prop_oneof![2 => problems(), 1 => branching()],
            name in prop::sample::select(&ONE_STAGE),
        ) {
            found(&problem, family(name).unwrap())?;
        }
    }

    #[test]
    fn most_answers_are_the_shortest_of_all_plans() {
        use proptest::strategy::ValueTree;
        use proptest::test_runner::TestRunner;
        let mut runner = TestRunner::deterministic();
        let (mut shortest, mut all) = (0, 0);
        for at in 0..200 {
            let problem = problems().new_tree(&mut runner).unwrap().current();
            let is_shortest = found(&problem, family(ONE_STAGE[at % ONE_STAGE.len()]).unwrap()).unwrap();
            shortest += usize::from(is_shortest == Some(true));
            all += usize::from(is_shortest.is_some());
        }
        // 145 of 193 when this was written.
        assert!(100 * shortest >= 70 * all, "{shortest} of {all}");
    }
}
