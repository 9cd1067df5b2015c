//! Exhaustive search: simulates every plan of a small problem. Tests compare the planner with it.
//!
//! It shares no code with the search beyond the cost of a single plan, so that a fault of the search cannot hide here.
//! Stages are lists of cuts, placements are counts of devices by stage and node, and numbers in flight are
//! enumerated.

use crate::control::Control;
use crate::cost::LayerSums;
use crate::cost::network::Cluster;
use crate::error::{Error, Result};
use crate::planner::hybrid::{
    evaluate::{
        candidate_plan::{CandidatePlan, StageCandidate},
        in_flight_ranges::every,
        plan_cost::{EvaluatedPlan, PlanEvaluator},
    },
    settings::{Recompute, Settings},
};

/// Maximum number of cuts: a chain of 12 layers.
const MAX_CUTS: usize = 13;
/// Maximum number of devices.
const MAX_DEVICES: u32 = 9;

/// Returns the plan with the shortest simulated step among all plans, and the number of plans.
///
/// # Errors
/// Returns [`Error::Argument`] if the problem is too large, [`Error::Infeasible`] if no plan fits the devices' memory,
/// and [`Error::TimedOut`] or [`Error::Cancelled`] if it was stopped.
pub fn exhaustive(
    model: &LayerSums,
    cluster: &Cluster,
    settings: &Settings,
    control: &Control,
) -> Result<(CandidatePlan, EvaluatedPlan, u64)> {
    settings.check()?;
    cluster.check()?;
    if !is_small(model, cluster) {
        let (cuts, devices) = (model.cuts(), cluster.devices());
        return Err(Error::argument(
            format!(
                "the problem has {cuts} cut points and {devices} devices, but the exhaustive search takes at most \
                 {MAX_CUTS} and {MAX_DEVICES}"
            ),
            "use the planner, which has no such limit",
        ));
    }
    let mut all = All::new(model, cluster, settings, control, u64::MAX);
    all.try_each()?;
    let plans = all.evaluator.simulated;
    let (plan, evaluated) = all.best.ok_or_else(|| Error::infeasible("no plan fits", "use more devices"))?;
    Ok((plan, evaluated, plans))
}

/// Result of [`exhaustive_within`].
#[derive(Debug)]
pub enum Exhausted {
    /// The best of all plans.
    Best(CandidatePlan, EvaluatedPlan),
    /// All plans were tried, and none fits.
    NothingFits,
    /// The problem is too large, or has more plans than the limit.
    TooMany,
}

/// Tries all plans of a valid problem like [`exhaustive`], unless they have more than `max_actions` actions in all.
///
/// # Errors
/// Returns [`Error::TimedOut`] or [`Error::Cancelled`] if it was stopped.
pub fn exhaustive_within(
    model: &LayerSums,
    cluster: &Cluster,
    settings: &Settings,
    control: &Control,
    max_actions: u64,
) -> Result<Exhausted> {
    if !is_small(model, cluster) {
        return Ok(Exhausted::TooMany);
    }
    let mut all = All::new(model, cluster, settings, control, max_actions);
    all.try_each()?;
    Ok(if all.is_over() {
        Exhausted::TooMany
    } else {
        all.best.map_or(Exhausted::NothingFits, |(plan, evaluated)| Exhausted::Best(plan, evaluated))
    })
}

/// Returns whether a problem has few cuts and devices.
fn is_small(model: &LayerSums, cluster: &Cluster) -> bool {
    model.cuts() <= MAX_CUTS && cluster.devices() <= MAX_DEVICES
}

/// State of the enumeration.
struct All<'a> {
    model: &'a LayerSums,
    cluster: &'a Cluster,
    settings: &'a Settings,
    control: &'a Control,
    evaluator: PlanEvaluator<'a>,
    /// Number of simulated actions that ends the enumeration. A stage of a plan that does not fit counts as one.
    max_actions: u64,
    /// Stages of plans that do not fit.
    unfit_stages: u64,
    best: Option<(CandidatePlan, EvaluatedPlan)>,
}

impl<'a> All<'a> {
    fn new(
        model: &'a LayerSums,
        cluster: &'a Cluster,
        settings: &'a Settings,
        control: &'a Control,
        max_actions: u64,
    ) -> Self {
        let evaluator = PlanEvaluator::new(model, cluster, settings);
        Self { model, cluster, settings, control, evaluator, max_actions, unfit_stages: 0, best: None }
    }

    /// Returns whether the limit on actions has ended the enumeration.
    fn is_over(&self) -> bool {
        self.evaluator.actions + self.unfit_stages > self.max_actions
    }

    /// Tries all plans.
    fn try_each(&mut self) -> Result<()> {
        for &micro_batch in &self.settings.pipeline_micro_batch_sizes {
            for &recompute in &self.settings.recompute {
                let mut plan = CandidatePlan { micro_batch, stages: Vec::new() };
                // Each micro-batch size starts with an empty cluster. `place` takes devices and gives them back.
                let mut free: Vec<u32> = self.cluster.nodes.iter().map(|node| node.devices).collect();
                self.place(&mut plan, self.model.cuts() - 1, recompute, &mut free)?;
            }
        }
        Ok(())
    }

    /// Tries all stages in front of `plan.stages`, whose first stage begins at cut `end`. Restores `plan` and `free`.
    fn place(&mut self, plan: &mut CandidatePlan, end: usize, choice: Recompute, free: &mut [u32]) -> Result<()> {
        if end == 0 {
            return self.try_max_in_flights(plan);
        }
        // An incomplete enumeration proves nothing, so a stopped one returns no plan.
        if self.control.should_stop() {
            return Err(self.control.error());
        }
        if plan.stages.len() as u32 >= self.settings.max_stages || self.is_over() {
            return Ok(());
        }
        let model = self.model;
        for begin in model.begins(end) {
            for footprint in footprints(free) {
                let replicas: u32 = footprint.iter().map(|&(_, count)| count).sum();
                // Stages are placed from the last one to the first, so the first stage of the plan is the one behind.
                let behind = plan.stages.first().map(StageCandidate::replicas);
                if self.settings.equal_replicas && behind.is_some_and(|behind| behind != replicas) {
                    continue;
                }
                // Mirrored placements have the same step. Skipping them is the only pruning here.
                if self.settings.samples_per_replica(plan.micro_batch, replicas).is_none()
                    || self.is_mirrored(plan, &footprint, free)
                {
                    continue;
                }
                for &(node, count) in &footprint {
                    free[node as usize] -= count;
                }
                for &recompute in choice.of_stage() {
                    let (begin, footprint) = (begin as usize, footprint.clone());
                    plan.stages.insert(0, StageCandidate { begin, end, footprint, max_in_flight: 1, recompute });
                    self.place(plan, begin, choice, free)?;
                    plan.stages.remove(0);
                }
                for &(node, count) in &footprint {
                    free[node as usize] += count;
                }
            }
        }
        Ok(())
    }

    /// Returns whether an idle node has an equal, idle node of higher number that this stage uses more. The
    /// mirrored placement is tried separately.
    fn is_mirrored(&self, plan: &CandidatePlan, footprint: &[(u32, u32)], free: &[u32]) -> bool {
        let nodes = &self.cluster.nodes;
        let takes = |node: usize| footprint.iter().find(|&&(other, _)| other as usize == node).map_or(0, |f| f.1);
        let untouched = |node: usize| {
            free[node] == nodes[node].devices
                && plan.stages.iter().all(|stage| stage.footprint.iter().all(|&(other, _)| other as usize != node))
        };
        (1..nodes.len()).any(|node| {
            nodes[node] == nodes[node - 1] && untouched(node) && untouched(node - 1) && takes(node) > takes(node - 1)
        })
    }

    fn try_max_in_flights(&mut self, plan: &CandidatePlan) -> Result<()> {
        let Some(ranges) = self.evaluator.ranges(plan)? else {
            self.unfit_stages += plan.stages.len() as u64;
            return Ok(());
        };
        // Every combination within memory is simulated: larger numbers in flight are not always better.
        for max_in_flights in every(&ranges, usize::MAX).into_iter().flatten() {
            if self.is_over() {
                break;
            }
            let mut plan = plan.clone();
            plan.stages
                .iter_mut()
                .zip(&max_in_flights)
                .for_each(|(stage, &max_in_flight)| stage.max_in_flight = max_in_flight);
            let evaluated = self.evaluator.evaluate(&plan)?;
            if self.best.as_ref().is_none_or(|(_, best)| evaluated.step_s < best.step_s) {
                self.best = Some((plan, evaluated));
            }
        }
        Ok(())
    }
}

/// Returns every non-empty choice of devices, as counts by node. Devices of one node are interchangeable.
fn footprints(free: &[u32]) -> Vec<Vec<(u32, u32)>> {
    let mut all: Vec<Vec<(u32, u32)>> = vec![Vec::new()];
    for (node, &max) in (0_u32..).zip(free) {
        all = (all.iter())
            .flat_map(|taken| {
                (0..=max).map(move |count| {
                    let mut taken = taken.clone();
                    if count > 0 {
                        taken.push((node, count));
                    }
                    taken
                })
            })
            .collect();
    }
    all.retain(|taken| !taken.is_empty());
    all
}
