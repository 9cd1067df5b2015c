//! All plans of a small problem, for schedules whose step the hybrid search can't compute.
//!
//! If the plans are few, each of them runs under the schedule, so the shortest step is the optimum.

use crate::planner::effort::action_lists as effort;
use crate::planner::hybrid::{CandidatePlan, Recompute, StageCandidate};

use super::Problem;

/// Returns every plan of a problem, or `None` if there are too many, or if they have too many actions.
///
/// Plans that differ only in equal nodes that no other stage uses are one plan. All stages have one micro-batch in
/// flight, since the schedule decides that number.
pub(super) fn every_plan(problem: &Problem<'_>) -> Option<Vec<CandidatePlan>> {
    let nodes = &problem.cluster.nodes;
    // Larger problems exceed the limits below, too, after milliseconds that they can be spared.
    if problem.model.cuts() > effort::EVERY_PLAN_CUTS || problem.cluster.devices() > effort::EVERY_PLAN_DEVICES {
        return None;
    }
    let mut all = All { problem, plans: Vec::new(), visited: 0, actions: 0 };
    for &micro_batch in &problem.settings.pipeline_micro_batch_sizes {
        for &recompute in &problem.settings.recompute {
            let plan = CandidatePlan { micro_batch, stages: Vec::new() };
            let mut free: Vec<u32> = nodes.iter().map(|node| node.devices).collect();
            all.place(&plan, problem.model.cuts() - 1, recompute, &mut free)?;
        }
    }
    Some(all.plans)
}

/// State of the enumeration.
struct All<'a> {
    problem: &'a Problem<'a>,
    plans: Vec<CandidatePlan>,
    /// Stages that were placed.
    visited: usize,
    /// Actions of all plans, if each backward pass is split.
    actions: u64,
}

impl All<'_> {
    /// Adds all plans with the stages of `plan` from cut `end` on. Restores `free`. `None` if a limit is exceeded.
    fn place(&mut self, plan: &CandidatePlan, end: usize, choice: Recompute, free: &mut [u32]) -> Option<()> {
        let Problem { model, cluster, settings } = *self.problem;
        let stages = plan.stages.len() as u32;
        if end == 0 {
            let actions = 3 * u64::from(settings.global_batch / plan.micro_batch) * u64::from(stages);
            self.actions += actions;
            self.plans.push(plan.clone());
            let is_small = actions <= effort::MAX_ACTIONS && self.actions <= effort::EVERY_PLAN_ACTIONS;
            return is_small.then_some(());
        }
        if stages >= settings.max_stages {
            return Some(());
        }
        for footprint in footprints(free) {
            let replicas = footprint.iter().map(|&(_, count)| count).sum();
            let behind = plan.stages.first().map(StageCandidate::replicas);
            if settings.samples_per_replica(plan.micro_batch, replicas).is_none()
                || (settings.equal_replicas && behind.is_some_and(|behind| behind != replicas))
                || self.has_earlier_twin(&footprint, free)
            {
                continue;
            }
            for &(node, count) in &footprint {
                free[node as usize] -= count;
            }
            for begin in model.begins(end) {
                self.visited += 1;
                if self.visited > effort::EVERY_PLAN_STAGES {
                    return None;
                }
                for &recompute in choice.of_stage() {
                    let (begin, footprint) = (begin as usize, footprint.clone());
                    let mut longer = plan.clone();
                    longer.stages.insert(0, StageCandidate { begin, end, footprint, max_in_flight: 1, recompute });
                    self.place(&longer, begin, choice, free)?;
                }
            }
            for &(node, count) in &footprint {
                free[node as usize] += count;
            }
        }
        debug_assert!(free.iter().zip(&cluster.nodes).all(|(&free, node)| free <= node.devices));
        Some(())
    }

    /// Returns whether an idle node is used more than an equal, idle node before it. The plan with both exchanged has
    /// the same step.
    fn has_earlier_twin(&self, footprint: &[(u32, u32)], free: &[u32]) -> bool {
        let nodes = &self.problem.cluster.nodes;
        let used =
            |node: usize| footprint.iter().find(|&&(other, _)| other as usize == node).map_or(0, |found| found.1);
        let is_idle = |node: usize| free[node] == nodes[node].devices;
        (0..nodes.len()).any(|later| {
            is_idle(later)
                && (0..later).any(|node| nodes[node] == nodes[later] && is_idle(node) && used(node) < used(later))
        })
    }
}

/// Returns every choice of at least one device, as numbers of devices by node. Devices of one node are equal.
fn footprints(free: &[u32]) -> Vec<Vec<(u32, u32)>> {
    let mut found: Vec<Vec<(u32, u32)>> = vec![Vec::new()];
    for (node, &devices) in (0_u32..).zip(free) {
        let taken = found.clone();
        for count in 1..=devices {
            found.extend(taken.iter().map(|footprint| [footprint.as_slice(), &[(node, count)]].concat()));
        }
    }
    found.retain(|footprint| !footprint.is_empty());
    found
}
