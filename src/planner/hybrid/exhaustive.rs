//! Prices every plan of a small question by simulation: the oracle that the search is held against.
//!
//! Written without the search's machinery: stages are lists of cuts, placements are tables of devices by stage and
//! machine, warm-up is a pattern of stages that run ahead.

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
    settings::Settings,
};

/// Cuts of a model that is small enough: 12 layers in a row.
const MOST_CUTS: usize = 13;
/// Devices of a cluster that is small enough.
const MOST_DEVICES: u32 = 9;

/// The plan with the shortest simulated step among all plans, and how many there are.
///
/// # Errors
/// [`Error::Argument`] if the question is too large, [`Error::Infeasible`] if no plan fits the devices' memory,
/// [`Error::TimedOut`] or [`Error::Cancelled`] if it was stopped.
pub fn exhaustive(
    model: &LayerSums,
    cluster: &Cluster,
    settings: &Settings,
    control: &Control,
) -> Result<(CandidatePlan, EvaluatedPlan, u64)> {
    settings.check()?;
    cluster.check()?;
    let (cuts, devices) = (model.cuts(), cluster.devices());
    if cuts > MOST_CUTS || devices > MOST_DEVICES {
        return Err(Error::argument(
            format!("{cuts} cut points on {devices} devices are too many to try every plan"),
            format!("at most {MOST_CUTS} and {MOST_DEVICES}; the planner itself has no such limit"),
        ));
    }
    let mut all =
        All { model, cluster, settings, control, pricer: PlanEvaluator::new(model, cluster, settings), best: None };
    for &micro_batch in &settings.micro_batch_sizes {
        for &recompute in &settings.recompute {
            let mut plan = CandidatePlan { micro_batch, recompute, stages: Vec::new() };
            let mut free: Vec<u32> = cluster.machines.iter().map(|machine| machine.devices).collect();
            all.place(&mut plan, cuts - 1, &mut free)?;
        }
    }
    let plans = all.pricer.simulated;
    let (plan, priced) = all.best.ok_or_else(|| Error::infeasible("no plan fits", "use more devices"))?;
    Ok((plan, priced, plans))
}

struct All<'a> {
    model: &'a LayerSums,
    cluster: &'a Cluster,
    settings: &'a Settings,
    control: &'a Control,
    pricer: PlanEvaluator<'a>,
    best: Option<(CandidatePlan, EvaluatedPlan)>,
}

impl All<'_> {
    /// Every way to put stages in front of `plan.stages`, which begin at `end`.
    fn place(&mut self, plan: &mut CandidatePlan, end: usize, free: &mut [u32]) -> Result<()> {
        if end == 0 {
            return self.try_max_in_flights(plan);
        }
        if self.control.should_stop() {
            return Err(self.control.error());
        }
        if plan.stages.len() as u32 >= self.settings.max_stages {
            return Ok(());
        }
        let model = self.model;
        for begin in model.begins(end) {
            for footprint in footprints(free) {
                let replicas: u32 = footprint.iter().map(|&(_, count)| count).sum();
                let behind = plan.stages.first().map(StageCandidate::replicas);
                if self.settings.equal_replicas && behind.is_some_and(|behind| behind != replicas) {
                    continue;
                }
                if self.settings.share(plan.micro_batch, replicas).is_none() || self.is_mirrored(plan, &footprint, free)
                {
                    continue;
                }
                for &(machine, count) in &footprint {
                    free[machine as usize] -= count;
                }
                plan.stages.insert(
                    0,
                    StageCandidate { begin: begin as usize, end, footprint: footprint.clone(), max_in_flight: 1 },
                );
                self.place(plan, begin as usize, free)?;
                plan.stages.remove(0);
                for &(machine, count) in &footprint {
                    free[machine as usize] += count;
                }
            }
        }
        Ok(())
    }

    /// Whether a machine is left idle while an equal one of higher number, as idle so far, is used more: the mirrored
    /// placement is tried anyway.
    fn is_mirrored(&self, plan: &CandidatePlan, footprint: &[(u32, u32)], free: &[u32]) -> bool {
        let machines = &self.cluster.machines;
        let takes = |machine: usize| footprint.iter().find(|&&(other, _)| other as usize == machine).map_or(0, |f| f.1);
        let untouched = |machine: usize| {
            free[machine] == machines[machine].devices
                && plan.stages.iter().all(|stage| stage.footprint.iter().all(|&(other, _)| other as usize != machine))
        };
        (1..machines.len()).any(|machine| {
            machines[machine] == machines[machine - 1]
                && untouched(machine)
                && untouched(machine - 1)
                && takes(machine) > takes(machine - 1)
        })
    }

    fn try_max_in_flights(&mut self, plan: &CandidatePlan) -> Result<()> {
        let Some(ranges) = self.pricer.ranges(plan)? else { return Ok(()) };
        for max_in_flights in every(&ranges, usize::MAX).into_iter().flatten() {
            let mut plan = plan.clone();
            plan.stages
                .iter_mut()
                .zip(&max_in_flights)
                .for_each(|(stage, &max_in_flight)| stage.max_in_flight = max_in_flight);
            let priced = self.pricer.price(&plan)?;
            if self.best.as_ref().is_none_or(|(_, best)| priced.step_s < best.step_s) {
                self.best = Some((plan, priced));
            }
        }
        Ok(())
    }
}

/// Every non-empty way to take devices from machines.
fn footprints(free: &[u32]) -> Vec<Vec<(u32, u32)>> {
    let mut all: Vec<Vec<(u32, u32)>> = vec![Vec::new()];
    for (machine, &most) in (0_u32..).zip(free) {
        all = (all.iter())
            .flat_map(|taken| {
                (0..=most).map(move |count| {
                    let mut taken = taken.clone();
                    if count > 0 {
                        taken.push((machine, count));
                    }
                    taken
                })
            })
            .collect();
    }
    all.retain(|taken| !taken.is_empty());
    all
}
