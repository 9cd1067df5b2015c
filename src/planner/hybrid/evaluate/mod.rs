//! What a plan costs. Every plan gets its numbers here: those of a search, those that a user gives, and those of other
//! schedules (`orders`).
//!
//! `stage_cost` has the time and memory of one stage. `plan_cost` adds what stages have to do with each other: transfers, tied
//! weights and the simulated step. `pipeline_simulator` simulates 1F1B, eager 1F1B and GPipe without a list of actions.
//! `in_flight_ranges` has the numbers of micro-batches in flight that memory allows.

pub(crate) mod candidate_plan;
pub(crate) mod in_flight_ranges;
pub(crate) mod pipeline_simulator;
pub(crate) mod plan_cost;
pub(crate) mod stage_cost;

use crate::control::Control;
use crate::cost::LayerSums;
use crate::cost::network::Cluster;
use crate::error::{Error, Result};
use crate::planner::effort::WHOLE;
use crate::planner::hybrid::{
    evaluate::{
        candidate_plan::{CandidatePlan, StageCandidate},
        in_flight_ranges::{Ranges, nearest},
        plan_cost::{EvaluatedPlan, PlanEvaluator},
    },
    search::local_search::improve_warm_ups,
    settings::{Settings, WarmUp},
};

/// Returns the fastest plan, over the allowed micro-batch sizes, with one stage between every two neighbouring cuts of
/// `model` on these devices. Plans that fit memory come first. Stages have as many micro-batches in flight as memory
/// allows, and fewer where that helps.
///
/// # Errors
/// [`Error::Argument`] if a device is unknown, idle in its stage or used twice, or if no micro-batch size can be shared.
pub fn evaluate(
    model: &LayerSums,
    cluster: &Cluster,
    settings: &Settings,
    devices: &[Vec<u32>],
) -> Result<(CandidatePlan, EvaluatedPlan)> {
    settings.check()?;
    cluster.check()?;
    let footprints = footprints(cluster, devices)?;
    let stages: Vec<StageCandidate> = (footprints.into_iter().enumerate())
        .map(|(begin, footprint)| StageCandidate { begin, end: begin + 1, footprint, max_in_flight: 1 })
        .collect();
    let mut pricer = PlanEvaluator::new(model, cluster, settings);
    let plan = fastest(&mut pricer, &stages, &Control::default())?;
    let priced = pricer.price(&plan)?;
    Ok((plan, priced))
}

/// Returns the fastest plan with these stages that fits memory, over micro-batch sizes and numbers in flight. If none
/// fits, returns the fastest one with the smallest numbers in flight.
pub(crate) fn fastest(
    pricer: &mut PlanEvaluator<'_>,
    stages: &[StageCandidate],
    control: &Control,
) -> Result<CandidatePlan> {
    let settings = pricer.settings;
    let mut best: Option<(bool, f64, CandidatePlan)> = None;
    let mut fitting: Vec<(f64, CandidatePlan)> = Vec::new();
    let mut refused = None;
    for &micro_batch in &settings.micro_batch_sizes {
        for &recompute in &settings.recompute {
            let plan = CandidatePlan { micro_batch, recompute, stages: stages.to_vec() };
            let prices = match pricer.stages(&plan) {
                Err(error) => {
                    refused = Some(error);
                    continue;
                }
                Ok(prices) => prices,
            };
            let ranges = pricer.ranges_of(&prices, micro_batch);
            let path_s = |ranges: &Ranges| pricer.max_path_s(&prices, ranges.iter().copied(), micro_batch);
            if let (Some(ranges), Some((true, best_s, _))) = (&ranges, &best)
                && path_s(ranges) >= *best_s
            {
                continue; // whatever the windows
            }
            let fits = ranges.is_some();
            let micro_batches = settings.global_batch / micro_batch;
            let max_in_flights = ranges.and_then(|ranges| nearest(&ranges, &vec![u32::MAX; stages.len()]));
            let max_in_flights = max_in_flights.unwrap_or_else(|| {
                (1..=stages.len() as u32)
                    .rev()
                    .map(|from_end| settings.max_in_flights(from_end, micro_batches).0)
                    .collect()
            });
            let step_s = pricer.step_s(&prices, &max_in_flights, micro_batch)?;
            let plan = plan.with_max_in_flights(&max_in_flights);
            if fits {
                fitting.push((step_s, plan.clone()));
            }
            if best.as_ref().is_none_or(|(best_fits, best_s, _)| (!fits, step_s) < (!best_fits, *best_s)) {
                best = Some((fits, step_s, plan));
            }
        }
    }
    match (best, refused) {
        // Other schedules leave no choice of warm-up.
        (Some((true, step_s, plan)), _) if settings.warm_up == WarmUp::Eager => {
            fitting.sort_by(|a, b| a.0.total_cmp(&b.0));
            let best = (fitting.iter())
                .fold((step_s, plan), |best, plan| improve_warm_ups(pricer, best, plan, WHOLE, control));
            Ok(best.1)
        }
        (Some((.., plan)), _) => Ok(plan),
        (None, Some(error)) => Err(error),
        (None, None) => Err(Error::argument("there is no micro-batch size to choose from", "give one")),
    }
}

/// Evaluates the plan with one stage between every two neighbouring cuts of `model`, on these devices, with these
/// numbers of micro-batches in flight, the first of the micro-batch sizes and the first choice about recomputation.
///
/// # Errors
/// As [`evaluate`]; [`Error::Argument`] if there is not one window for each stage, [`Error::Schedule`] if windows grow
/// along the stages.
pub fn reprice(
    model: &LayerSums,
    cluster: &Cluster,
    settings: &Settings,
    devices: &[Vec<u32>],
    max_in_flights: &[u32],
) -> Result<(CandidatePlan, EvaluatedPlan)> {
    settings.check()?;
    cluster.check()?;
    let (Some(&micro_batch), Some(&recompute)) = (settings.micro_batch_sizes.first(), settings.recompute.first())
    else {
        return Err(Error::argument("there is no micro-batch size to choose from", "give one"));
    };
    if max_in_flights.len() != devices.len() {
        return Err(Error::argument(
            format!("{} max_in_flights are given for {} stages", max_in_flights.len(), devices.len()),
            "give each stage one",
        ));
    }
    if let Some(stage) = max_in_flights.iter().position(|&max_in_flight| max_in_flight == 0) {
        return Err(Error::argument(
            format!("stage {stage} has no micro-batch in flight"),
            "each stage has one at least while it runs",
        ));
    }
    let stages = (footprints(cluster, devices)?.into_iter().zip(max_in_flights).enumerate())
        .map(|(begin, (footprint, &max_in_flight))| StageCandidate { begin, end: begin + 1, footprint, max_in_flight })
        .collect();
    let plan = CandidatePlan { micro_batch, recompute, stages };
    let priced = PlanEvaluator::new(model, cluster, settings).price(&plan)?;
    Ok((plan, priced))
}

/// Returns for each stage how many devices it has on each machine. No device is in two stages.
fn footprints(cluster: &Cluster, devices: &[Vec<u32>]) -> Result<Vec<Vec<(u32, u32)>>> {
    let mut stage_of = vec![None; cluster.devices() as usize];
    for (stage, devices) in devices.iter().enumerate() {
        if devices.is_empty() {
            return Err(Error::argument(format!("stage {stage} has no devices"), "give it at least one"));
        }
        for &device in devices {
            if device >= cluster.devices() {
                return Err(Error::argument(
                    format!("stage {stage} names device {device}, but the cluster has {} devices", cluster.devices()),
                    "devices are numbered from 0, machine by machine",
                ));
            }
            if let Some(other) = stage_of[device as usize].replace(stage) {
                return Err(Error::argument(
                    if other == stage {
                        format!("stage {stage} names device {device} twice")
                    } else {
                        format!("device {device} is in stage {other} and in stage {stage}")
                    },
                    "each device runs one stage, once",
                ));
            }
        }
    }
    Ok(devices.iter().map(|devices| cluster.footprint(devices)).collect())
}
