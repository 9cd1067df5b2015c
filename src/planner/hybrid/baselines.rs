//! Baseline plans: pure data parallelism, and a pipeline with one device per stage. Also plans that show what would
//! fit.
//!
//! Both baselines are in the search space. Reports state how much slower they are, or how much memory they lack.

use crate::control::{Control, Stopped};
use crate::cost::network::Cluster;
use crate::cost::{LayerSums, MemoryModel};
use crate::error::{Error, Result};
use crate::planner::effort::{SHORT, WHOLE, passes, placement::SHORTFALL_CHECKS};
use crate::planner::hybrid::{
    Schedules, Search, SearchResult,
    bounds::memory::nothing_fits_at_a_glance,
    evaluate::{
        candidate_plan::{CandidatePlan, StageCandidate},
        plan_cost::{EvaluatedPlan, PlanEvaluator},
    },
    nothing_fits,
    placement::packing::Packing,
    settings::{Recompute, Settings},
    subproblem::Subproblem,
};

/// Returns the best plan with a single stage, on the largest number of devices that may share a micro-batch.
///
/// Plans that fit are compared by their step, all others by the memory that they lack. `None` if no number of devices
/// may share any micro-batch size.
#[must_use]
pub fn data_parallel(
    model: &LayerSums,
    cluster: &Cluster,
    settings: &Settings,
) -> Option<(CandidatePlan, EvaluatedPlan)> {
    let mut evaluator = PlanEvaluator::new(model, cluster, settings);
    let mut best: Option<(f64, CandidatePlan, EvaluatedPlan)> = None;
    for &micro_batch in &settings.pipeline_micro_batch_sizes {
        let Some(replicas) =
            (1..=cluster.devices()).rev().find(|&r| settings.samples_per_replica(micro_batch, r).is_some())
        else {
            continue;
        };
        for &recompute in &settings.recompute {
            let end = model.cuts() - 1;
            let max_in_flight = settings.max_in_flights(1, settings.global_batch / micro_batch).0;
            let footprint = first_devices(cluster, replicas);
            let stage = StageCandidate { begin: 0, end, footprint, max_in_flight, recompute: false };
            let mut plan = CandidatePlan { micro_batch, stages: vec![stage] }.with_recompute(recompute);
            let Ok(_) = evaluator.settled(&mut plan) else { continue };
            let Ok(evaluated) = evaluator.evaluate(&plan) else { continue };
            let lacking_bytes = evaluated.stages[0].memory.total_bytes() - evaluated.stages[0].capacity_bytes;
            // Any plan that fits is better than one that does not. Two plans that fit are compared by step time, two
            // that do not by the memory that they lack.
            let better = best.as_ref().is_none_or(|(best_lacking_bytes, _, best)| {
                match (lacking_bytes > 0.0, *best_lacking_bytes > 0.0) {
                    (false, true) => true,
                    (true, false) => false,
                    (false, false) => evaluated.step_s < best.step_s,
                    (true, true) => lacking_bytes < *best_lacking_bytes,
                }
            });
            if better {
                best = Some((lacking_bytes, plan, evaluated));
            }
        }
    }
    best.map(|(_, plan, evaluated)| (plan, evaluated))
}

/// Result of a short search for a pipeline with one device per stage.
#[derive(Debug, Clone)]
pub struct PipelineOnly {
    /// Best plan found, with its costs.
    pub plan: Option<(CandidatePlan, EvaluatedPlan)>,
    /// Reason why better plans, or any plan at all, may have been missed.
    pub stopped: Option<Stopped>,
}

/// Returns the best pipeline with one device per stage that a short search finds.
///
/// # Errors
/// Returns the errors of [`crate::planner::hybrid::plan`], except that it is no error if there is no such plan.
pub fn pipeline_only(
    model: &LayerSums,
    cluster: &Cluster,
    settings: &Settings,
    control: &Control,
) -> Result<PipelineOnly> {
    if let Some(stopped) = control.stopped() {
        return Ok(PipelineOnly { plan: None, stopped: Some(stopped) });
    }
    // With at most one replica per stage, every plan of the search space is such a pipeline.
    let settings = Settings { max_replicas: 1, ..settings.clone() };
    let mut search = Search::new(model, cluster, &settings, SHORT, control);
    search.try_patterns()?;
    if search.best.is_none() {
        search.start()?;
    }
    if search.best.is_none() {
        search.bound();
        search.reach()?;
    }
    search.pass(search.step_s(), passes::SHORT_BEAM)?;
    let mut stopped = search.stopped();
    // Without a plan, "none exists" needs a proof: all cuts and placements searched, or a failed memory condition.
    // Otherwise the result is reported as incomplete.
    let is_all = model.has_all_cuts && search.is_exact();
    if search.best.is_none() && !is_all && !nothing_fits(model, cluster, &settings, Schedules::OF_SETTINGS, control)? {
        stopped = stopped.or(Some(Stopped::Effort)); // other cuts or placements may have a plan
    }
    let plan = match search.best {
        Some((_, plan)) => Some((search.evaluator.evaluate(&plan)?, plan)),
        None => None,
    };
    Ok(PipelineOnly { plan: plan.map(|(evaluated, plan)| (plan, evaluated)), stopped })
}

/// Returns any plan that fits, without a proof of its quality.
///
/// # Errors
/// Returns [`Error::Infeasible`] if none fits, [`Error::TimedOut`] or [`Error::Cancelled`] if it was stopped before
/// that was known.
pub fn fitting(model: &LayerSums, cluster: &Cluster, settings: &Settings, control: &Control) -> Result<SearchResult> {
    let mut search = Search::new(model, cluster, settings, WHOLE, control);
    search.start()?;
    if search.best.is_none() {
        search.bound();
        search.reach()?;
    }
    search.answer()
}

/// Returns whether some plan fits that can be made without a search. `false` does not prove that none fits.
///
/// # Errors
/// Returns [`Error::Argument`] or [`Error::Cluster`] for invalid input.
fn fits_at_once(model: &LayerSums, cluster: &Cluster, settings: &Settings, control: &Control) -> Result<bool> {
    if nothing_fits_at_a_glance(model, cluster, settings, control)? {
        return Ok(false);
    }
    // Packing ignores links, which do not decide whether a plan fits, and takes milliseconds instead of a search.
    Ok(Subproblem::all(model, cluster, settings).iter().any(|task| Packing::coarse(task).has_plan(control)))
}

/// Returns for each possible change whether some plan fits with it that can be made without a search.
///
/// The changes are, in this order: recomputation, a sharded optimizer state, both, one micro-batch in flight, and twice
/// the nodes.
///
/// # Errors
/// Returns [`Error::Argument`] or [`Error::Cluster`] for invalid input.
pub fn helpful_changes(
    model: &LayerSums,
    cluster: &Cluster,
    settings: &Settings,
    control: &Control,
) -> Result<Vec<bool>> {
    let recomputed = Settings { recompute: vec![Recompute::Always], ..settings.clone() };
    let sharding = MemoryModel {
        zero_stage: settings.memory.zero_stage.max(1),
        max_zero_stage: settings.memory.max_zero_stage.max(1),
        ..settings.memory
    };
    // A global batch of one micro-batch has only one in flight. The smallest size needs the least memory.
    let smallest = settings.pipeline_micro_batch_sizes.first().copied().unwrap_or(settings.global_batch);
    let single = Settings {
        global_batch: smallest,
        pipeline_micro_batch_sizes: vec![smallest],
        recompute: vec![Recompute::Never],
        ..settings.clone()
    };
    let doubled = Cluster { nodes: cluster.nodes.repeat(2), ..cluster.clone() };
    let changes = [
        (cluster, recomputed.clone()),
        (cluster, Settings { memory: sharding, ..settings.clone() }),
        (cluster, Settings { memory: sharding, ..recomputed }),
        (cluster, single),
        (&doubled, settings.clone()),
    ];
    changes.iter().map(|(cluster, settings)| fits_at_once(model, cluster, settings, control)).collect()
}

/// Returns the plan of [`closest`] after a short search of fixed effort.
///
/// # Errors
/// The errors of [`closest`].
pub fn closest_in_short(
    model: &LayerSums,
    cluster: &Cluster,
    settings: &Settings,
) -> Result<(CandidatePlan, EvaluatedPlan)> {
    closest(model, cluster, settings, &Control::with_checks(SHORTFALL_CHECKS))
}

/// Returns the plan that lacks the least memory among the plans of `Packing`, with its costs. If stopped early,
/// returns the closest plan so far.
///
/// # Errors
/// Returns [`Error::Infeasible`] if no micro-batch can be shared at all, and [`Error::TimedOut`] or
/// [`Error::Cancelled`] if it was stopped before there was any plan.
pub fn closest(
    model: &LayerSums,
    cluster: &Cluster,
    settings: &Settings,
    control: &Control,
) -> Result<(CandidatePlan, EvaluatedPlan)> {
    settings.check()?;
    cluster.check()?;
    let mut best: Option<(f64, CandidatePlan)> = None;
    for task in Subproblem::all(model, cluster, settings) {
        // Another size is worth its search only if it lacks clearly less, so the limit is a part of the best so far.
        let less_bytes = best.as_ref().map_or(f64::INFINITY, |(bytes, _)| bytes * passes::SMALLER_SHORTFALL);
        best = Packing::coarse(&task).closest(less_bytes, control).or(best);
    }
    match best {
        Some((_, mut plan)) => {
            let mut evaluator = PlanEvaluator::new(model, cluster, settings);
            evaluator.settled(&mut plan)?;
            evaluator.evaluate(&plan).map(|evaluated| (plan, evaluated))
        }
        None if control.should_stop() => Err(control.error()),
        None => Err(Error::infeasible(
            "no number of replicas can share any of the micro-batch sizes",
            "allow other micro-batch sizes",
        )),
    }
}

/// Returns the first `count` devices, node by node, as counts by node.
fn first_devices(cluster: &Cluster, mut count: u32) -> Vec<(u32, u32)> {
    let mut footprint = Vec::new();
    for (node, devices) in (0_u32..).zip(cluster.nodes.iter().map(|node| node.devices)) {
        let taken = devices.min(count);
        if taken > 0 {
            footprint.push((node, taken));
        }
        count -= taken;
    }
    footprint
}
