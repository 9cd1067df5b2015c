//! Local search: small changes of a good plan, each evaluated by simulation.

use crate::control::Control;
use crate::cost::LayerSums;
use crate::planner::effort::{WorkBudget, passes};
use crate::planner::hybrid::{
    bounds::paths::Paths,
    evaluate::{
        candidate_plan::CandidatePlan,
        in_flight_ranges::{Ranges, every, nearest},
        plan_cost::PlanEvaluator,
        stage_cost::{StageCost, path_stage},
    },
    settings::{Recompute, Settings, WarmUp},
};

/// A neighbor of a plan, and the numbers of micro-batches in flight that its stages should have if memory allows.
type Neighbour = (CandidatePlan, Vec<u32>);

/// Runs local search and returns its best plan. Neighbors differ in one cut, one device or one number in flight.
pub(crate) fn improve(
    model: &LayerSums,
    evaluator: &mut PlanEvaluator<'_>,
    start: (f64, CandidatePlan),
    effort: WorkBudget,
    control: &Control,
) -> (f64, CandidatePlan) {
    climb(evaluator, start, effort, control, |evaluator, plan, ranges| {
        let mut plans = shifts(model, plan, ranges, &evaluator.alike(plan));
        plans.extend(warm_ups(plan, ranges));
        plans.extend(recomputations(evaluator.settings, plan));
        plans
    })
}

/// Returns the better one of `best` and the stages of `plan` with other numbers of micro-batches in flight.
///
/// All combinations are tried if they are few. Otherwise local search starts from the best one of `plan` and of
/// combinations with short paths.
pub(crate) fn improve_warm_ups(
    evaluator: &mut PlanEvaluator<'_>,
    best: (f64, CandidatePlan),
    plan: &(f64, CandidatePlan),
    effort: WorkBudget,
    control: &Control,
) -> (f64, CandidatePlan) {
    let Ok(stage_costs) = evaluator.stages(&plan.1) else { return best };
    let micro_batch = plan.1.micro_batch;
    let Some(ranges) = evaluator.ranges_of(&stage_costs, micro_batch) else { return best };
    // Below this difference two sums of the same times differ by rounding alone.
    let limit_s = |best_s: f64| best_s * (1.0 - 1e-12);
    // The longest path over all ranges is a lower bound for every choice of numbers in flight, so one test may end the
    // search.
    if evaluator.max_path_s(&stage_costs, ranges.iter().copied(), micro_batch) >= limit_s(best.0) {
        return best;
    }
    // The number of combinations is exponential in the number of stages.
    let Some(all) = every(&ranges, passes::ALL_WINDOWS) else {
        let promising = promising(&stage_costs, &ranges, evaluator.settings.global_batch / micro_batch);
        let evaluated = promising.into_iter().filter_map(|max_in_flights| {
            let step_s = evaluator.step_s(&stage_costs, &max_in_flights, micro_batch).ok()?;
            Some((step_s, max_in_flights))
        });
        let start = (plan.0, plan.1.max_in_flights());
        let (step_s, max_in_flights) = evaluated.fold(start, |best, found| if found.0 < best.0 { found } else { best });
        let start = (step_s, plan.1.clone().with_max_in_flights(&max_in_flights));
        let found = climb(evaluator, start, effort, control, |_, plan, ranges| warm_ups(plan, ranges));
        return if found.0 < best.0 { found } else { best };
    };
    let mut best = best;
    // `effort` limits the actions of this call, while the evaluator counts the actions of the whole search.
    let until = evaluator.actions + effort.actions;
    for max_in_flights in all {
        if evaluator.actions >= until || control.should_stop() {
            break;
        }
        if evaluator.path_s(&stage_costs, &max_in_flights, micro_batch) < limit_s(best.0)
            && let Ok(step_s) = evaluator.step_s(&stage_costs, &max_in_flights, micro_batch)
            && step_s < limit_s(best.0)
        {
            best = (step_s, plan.1.clone().with_max_in_flights(&max_in_flights));
        }
    }
    best
}

/// Returns combinations of numbers in flight with short paths, found by a label search over the stages.
fn promising(stage_costs: &[StageCost], ranges: &Ranges, micro_batches: u32) -> Vec<Vec<u32>> {
    let mut labels: Vec<(Paths, Vec<u32>)> = vec![(Paths::default(), Vec::new())]; // last stage first
    // As in the main search, suffixes that agree in the number in flight of their first stage compete by dominance. The
    // beam makes this a heuristic: the result is only a set of starting points.
    for (stage_cost, &(min, max)) in stage_costs.iter().zip(ranges).rev() {
        let mut longer = Vec::new();
        for max_in_flight in min..=max {
            let mut these: Vec<(Paths, Vec<u32>)> = Vec::new();
            for (paths, behind) in &labels {
                // Numbers in flight never grow along the stages.
                let next = behind.last().copied().unwrap_or(1);
                if next > max_in_flight {
                    continue;
                }
                let paths = paths.extend(&path_stage(stage_cost, (max_in_flight, max_in_flight)), next, micro_batches);
                if !these.iter().any(|(rival, _)| rival.dominates(&paths, micro_batches)) {
                    these.retain(|(rival, _)| !paths.dominates(rival, micro_batches));
                    these.push((paths, behind.iter().copied().chain([max_in_flight]).collect()));
                }
            }
            these.sort_by(|a, b| a.0.synced_s.total_cmp(&b.0.synced_s));
            these.truncate(passes::PROMISING_WINDOWS);
            longer.extend(these);
        }
        labels = longer;
    }
    labels.sort_by(|a, b| a.0.synced_s.total_cmp(&b.0.synced_s));
    labels.truncate(4 * passes::PROMISING_WINDOWS);
    labels.into_iter().map(|(_, max_in_flights)| max_in_flights.into_iter().rev().collect()).collect()
}

/// Replaces the plan by its best neighbor until no neighbor is better or a limit is reached.
fn climb(
    evaluator: &mut PlanEvaluator<'_>,
    start: (f64, CandidatePlan),
    effort: WorkBudget,
    control: &Control,
    neighbours: impl Fn(&PlanEvaluator<'_>, &CandidatePlan, &Ranges) -> Vec<Neighbour>,
) -> (f64, CandidatePlan) {
    let (limit, until) = (evaluator.simulated + effort.improved, evaluator.actions + effort.actions);
    let mut parts_left = passes::LOCAL_SEARCH_NODES;
    let mut best = start;
    loop {
        // The best of all neighbors is taken, not the first better one, so the result does not depend on their order.
        let mut better: Option<(f64, CandidatePlan)> = None;
        let Ok(known) = evaluator.stages(&best.1) else { return best };
        let Some(ranges) = evaluator.ranges_of(&known, best.1.micro_batch) else { return best };
        for (mut plan, wanted) in neighbours(evaluator, &best.1, &ranges) {
            let is_much = evaluator.simulated >= limit || evaluator.actions >= until || parts_left == 0;
            if is_much || control.should_stop() {
                break;
            }
            parts_left = parts_left.saturating_sub(plan.stages.iter().map(|stage| stage.footprint.len()).sum());
            // Only the changed stages are evaluated again. The others keep the costs of the current plan.
            let Ok(stage_costs) = evaluator.stages_but(&plan, (&best.1, &known)) else { continue };
            let Ok(stage_costs) = evaluator.settle(&mut plan, stage_costs) else { continue };
            let ranges = evaluator.ranges_of(&stage_costs, plan.micro_batch);
            let Some(max_in_flights) = ranges.and_then(|ranges| nearest(&ranges, &wanted)) else { continue };
            // Differences below this come from the order of summation only, and accepting them could loop forever.
            let limit_s = better.as_ref().map_or(best.0, |(step_s, _)| *step_s) * (1.0 - 1e-12);
            // The longest path bounds the step from below, so most neighbors need no simulation.
            if evaluator.path_s(&stage_costs, &max_in_flights, plan.micro_batch) >= limit_s {
                continue;
            }
            let Ok(step_s) = evaluator.step_s(&stage_costs, &max_in_flights, plan.micro_batch) else { continue };
            if step_s < limit_s {
                better = Some((step_s, plan.with_max_in_flights(&max_in_flights)));
            }
        }
        match better {
            Some(found) => best = found,
            None => return best,
        }
    }
}

/// Returns neighbors that differ in one number in flight: by one, or at an end of its range.
fn warm_ups(plan: &CandidatePlan, ranges: &Ranges) -> Vec<Neighbour> {
    let mut plans = Vec::new();
    for (index, &(min, max)) in ranges.iter().enumerate() {
        let now = plan.stages[index].max_in_flight;
        let mut others = vec![max, min, now + 1, now - 1];
        others.retain(|&max_in_flight| max_in_flight != now && (min..=max).contains(&max_in_flight));
        others.sort_unstable();
        others.dedup();
        for max_in_flight in others {
            let mut wanted = plan.max_in_flights();
            wanted[index] = max_in_flight;
            // Numbers in flight must not grow along the stages, so later stages are lowered with this one.
            wanted[index..].iter_mut().for_each(|behind| *behind = max_in_flight.min(*behind));
            plans.push((plan.clone(), wanted));
        }
    }
    plans
}

/// Returns neighbors that differ in whether one stage recomputes its activations. Where only one choice makes sense,
/// [`PlanEvaluator::settle`] takes it back.
fn recomputations(settings: &Settings, plan: &CandidatePlan) -> Vec<Neighbour> {
    // With equal numbers in flight, memory alone decides.
    if settings.warm_up != WarmUp::Eager || !settings.recompute.contains(&Recompute::ByStage) {
        return Vec::new();
    }
    (0..plan.stages.len())
        .map(|stage| {
            let mut other = plan.clone();
            other.stages[stage].recompute = !plan.stages[stage].recompute;
            (other, vec![u32::MAX; plan.stages.len()])
        })
        .collect()
}

/// Returns neighbors that differ in one cut or in the stage of one device.
fn shifts(model: &LayerSums, plan: &CandidatePlan, ranges: &Ranges, alike: &[u32]) -> Vec<Neighbour> {
    // A stage at its memory limit should stay at the limit after the change, even if the limit itself changes.
    let wanted: Vec<u32> = (plan.stages.iter().zip(ranges))
        .map(
            |(stage, &(min, max))| {
                if stage.max_in_flight == max && max > min { u32::MAX } else { stage.max_in_flight }
            },
        )
        .collect();
    let mut plans = Vec::new();
    let mut with = |change: &dyn Fn(&mut CandidatePlan)| {
        let mut other = plan.clone();
        change(&mut other);
        plans.push((other, wanted.clone()));
    };
    let nested = |begin: usize, end: usize| model.is_inside(begin, end);
    for border in 1..plan.stages.len() {
        let (before, after) = (&plan.stages[border - 1], &plan.stages[border]);
        // A border may jump over one cut, because a single step can be worse where the next one is better.
        for distance in [1_usize, 2] {
            for cut in [after.begin.wrapping_sub(distance), after.begin + distance] {
                if cut > before.begin && cut < after.end && nested(before.begin, cut) && nested(cut, after.end) {
                    with(&|other| {
                        other.stages[border - 1].end = cut;
                        other.stages[border].begin = cut;
                    });
                }
            }
        }
        // One device changes sides, if its stage has another one left. Of several equal nodes, only the first is
        // tried.
        for (from, to) in [(border - 1, border), (border, border - 1)] {
            for &(node, _) in plan.stages[from].footprint.iter().filter(|&&(node, _)| alike[node as usize] == node) {
                if plan.stages[from].replicas() > 1 {
                    with(&|other| {
                        add(&mut other.stages[from].footprint, node, -1);
                        add(&mut other.stages[to].footprint, node, 1);
                    });
                }
            }
        }
    }
    plans
}

/// Adds `devices` (1 or -1) of a node to a footprint, and removes nodes without devices.
fn add(footprint: &mut Vec<(u32, u32)>, node: u32, devices: i32) {
    match footprint.iter_mut().find(|(other, _)| *other == node) {
        Some((_, count)) => *count = count.saturating_add_signed(devices),
        None => footprint.push((node, 1)),
    }
    footprint.retain(|&(_, count)| count > 0);
    footprint.sort_unstable();
}
