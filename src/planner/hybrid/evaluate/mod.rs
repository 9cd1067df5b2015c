//! Evaluation of plans: step time and memory of the plans of a search, of plans that a user gives, and of plans for
//! other schedules (`action_lists`).
//!
//! `stage_cost` has the time and memory of one stage, and `stage_memory` the memory with and without recomputation.
//! `shares` divides a micro-batch among replicas of different speed.
//! `plan_cost` adds transfers between stages, tied weights and the
//! simulated step. `pipeline_simulator` simulates 1F1B, eager 1F1B and GPipe without a list of actions.
//! `in_flight_ranges` has the numbers of micro-batches in flight that memory allows.

pub(crate) mod candidate_plan;
pub(crate) mod in_flight_ranges;
pub(crate) mod pipeline_simulator;
pub(crate) mod plan_cost;
pub(crate) mod shares;
pub(crate) mod stage_cost;
pub(crate) mod stage_memory;

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
    search::local_search::{improve, improve_warm_ups},
    settings::{Settings, WarmUp},
};

/// Returns the fastest plan, over the allowed micro-batch sizes, with one stage between every two neighboring cuts of
/// `model` on these devices.
///
/// Plans that fit memory are preferred to all others. Stages have the largest number of micro-batches in flight that
/// memory allows, or a smaller one where that shortens the step.
///
/// # Errors
/// [`Error::Argument`] if a stage has no devices, if a device is unknown or used twice, or if no micro-batch size can
/// be split over the replicas.
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
        .map(|(begin, footprint)| StageCandidate {
            begin,
            end: begin + 1,
            footprint,
            max_in_flight: 1,
            recompute: false,
        })
        .collect();
    let mut evaluator = PlanEvaluator::new(model, cluster, settings);
    let plan = fastest(&mut evaluator, &stages, &Control::default())?;
    let evaluated = evaluator.evaluate(&plan)?;
    Ok((plan, evaluated))
}

/// Returns the best plan that local search finds from these stages, and its step in seconds. Returns `None` if they fit
/// memory with no micro-batch size.
///
/// # Errors
/// The errors of [`evaluate`].
pub fn improve_stages(
    evaluator: &mut PlanEvaluator<'_>,
    stages: &[StageCandidate],
    control: &Control,
) -> Result<Option<(f64, CandidatePlan)>> {
    let start = fastest(evaluator, stages, control)?;
    let evaluated = evaluator.evaluate(&start)?;
    if !PlanEvaluator::fits(&evaluated.stages) {
        return Ok(None);
    }
    let found = improve(evaluator.model, evaluator, (evaluated.step_s, start), WHOLE, control);
    // The search keeps the micro-batch size, but another one may suit its stages.
    let again = fastest(evaluator, &found.1.stages, control)?;
    let again_s = evaluator.evaluate(&again)?.step_s;
    Ok(Some(if again_s < found.0 { (again_s, again) } else { found }))
}

/// Returns the fastest plan with these stages that fits memory, over micro-batch sizes and numbers in flight. If none
/// fits, returns the fastest one with the smallest numbers in flight.
pub(crate) fn fastest(
    evaluator: &mut PlanEvaluator<'_>,
    stages: &[StageCandidate],
    control: &Control,
) -> Result<CandidatePlan> {
    let settings = evaluator.settings;
    let mut best: Option<(bool, f64, CandidatePlan)> = None;
    let mut fitting: Vec<(f64, CandidatePlan)> = Vec::new();
    let mut refused = None;
    for &micro_batch in &settings.pipeline_micro_batch_sizes {
        let mut plans = Vec::new();
        for &recompute in &settings.recompute {
            let plan = CandidatePlan { micro_batch, stages: stages.to_vec() }.with_recompute(recompute);
            plans.extend(evaluator.recomputations(plan));
        }
        for plan in plans {
            let costs = match evaluator.stages(&plan) {
                // Skip a size that the replicas cannot share. Its error matters only if no size is left.
                Err(error) => {
                    refused = Some(error);
                    continue;
                }
                Ok(costs) => costs,
            };
            let ranges = evaluator.ranges_of(&costs, micro_batch);
            let path_s = |ranges: &Ranges| evaluator.max_path_s(&costs, ranges.iter().copied(), micro_batch);
            if let (Some(ranges), Some((true, best_s, _))) = (&ranges, &best)
                && path_s(ranges) >= *best_s
            {
                // No numbers in flight within the ranges make the step shorter than this path.
                continue;
            }
            let fits = ranges.is_some();
            let micro_batches = settings.global_batch / micro_batch;
            let max_in_flights = ranges.and_then(|ranges| nearest(&ranges, &vec![u32::MAX; stages.len()]));
            // If the plan fits with no numbers, the smallest ones lack the least memory.
            let max_in_flights = max_in_flights.unwrap_or_else(|| {
                (1..=stages.len() as u32)
                    .rev()
                    .map(|from_end| settings.max_in_flights(from_end, micro_batches).0)
                    .collect()
            });
            let step_s = evaluator.step_s(&costs, &max_in_flights, micro_batch)?;
            let plan = plan.with_max_in_flights(&max_in_flights);
            if fits {
                fitting.push((step_s, plan.clone()));
            }
            // `false` sorts before `true`, so plans that fit come before all others.
            if best.as_ref().is_none_or(|(best_fits, best_s, _)| (!fits, step_s) < (!best_fits, *best_s)) {
                best = Some((fits, step_s, plan));
            }
        }
    }
    match (best, refused) {
        // Only eager 1F1B leaves a choice of numbers in flight.
        (Some((true, step_s, plan)), _) if settings.warm_up == WarmUp::Eager => {
            // A slower size may become the fastest with other numbers in flight, so improve every plan that fits. The
            // fastest comes first, since its step rules out most choices of the others.
            fitting.sort_by(|a, b| a.0.total_cmp(&b.0));
            let best = (fitting.iter())
                .fold((step_s, plan), |best, plan| improve_warm_ups(evaluator, best, plan, WHOLE, control));
            Ok(best.1)
        }
        (Some((.., plan)), _) => Ok(plan),
        (None, Some(error)) => Err(error),
        (None, None) => Err(Error::argument(
            "there is no micro-batch size to choose from",
            "give at least one micro-batch size, such as 1",
        )),
    }
}

/// Evaluates the plan with one stage between every two neighboring cuts of `model`, on these devices, with these
/// numbers of micro-batches in flight. `recompute` has whether each stage recomputes its activations. It takes the first
/// of the micro-batch sizes.
///
/// # Errors
/// The errors of [`evaluate`]. [`Error::Argument`] if there is not one number in flight of at least 1 for each stage.
/// [`Error::Schedule`] if numbers in flight grow along the stages.
pub fn evaluate_in_flight(
    model: &LayerSums,
    cluster: &Cluster,
    settings: &Settings,
    devices: &[Vec<u32>],
    max_in_flights: &[u32],
    recompute: &[bool],
) -> Result<(CandidatePlan, EvaluatedPlan)> {
    settings.check()?;
    cluster.check()?;
    let Some(&micro_batch) = settings.pipeline_micro_batch_sizes.first() else {
        return Err(Error::argument(
            "there is no micro-batch size to choose from",
            "give at least one micro-batch size, such as 1",
        ));
    };
    if max_in_flights.len() != devices.len() {
        return Err(Error::argument(
            format!("max_in_flights has {} numbers, but the plan has {} stages", max_in_flights.len(), devices.len()),
            "give one number for each stage",
        ));
    }
    if let Some(stage) = max_in_flights.iter().position(|&max_in_flight| max_in_flight == 0) {
        return Err(Error::argument(
            format!("stage {stage} has 0 micro-batches in flight, but each stage needs at least 1"),
            format!("set max_in_flight of stage {stage} to 1 or more"),
        ));
    }
    if recompute.len() != devices.len() {
        return Err(Error::argument(
            format!("recompute has {} values, but the plan has {} stages", recompute.len(), devices.len()),
            "give one value for each stage",
        ));
    }
    let stages = (footprints(cluster, devices)?.into_iter().zip(max_in_flights.iter().zip(recompute)).enumerate())
        .map(|(begin, (footprint, (&max_in_flight, &recompute)))| StageCandidate {
            begin,
            end: begin + 1,
            footprint,
            max_in_flight,
            recompute,
        })
        .collect();
    let plan = CandidatePlan { micro_batch, stages };
    let evaluated = PlanEvaluator::new(model, cluster, settings).evaluate(&plan)?;
    Ok((plan, evaluated))
}

/// Returns pairs `(node, devices)` for each stage. Fails if a device is unknown or in two stages.
fn footprints(cluster: &Cluster, devices: &[Vec<u32>]) -> Result<Vec<Vec<(u32, u32)>>> {
    // Remember the stage of each device, to name both stages in the message.
    let mut stage_of = vec![None; cluster.devices() as usize];
    for (stage, devices) in devices.iter().enumerate() {
        if devices.is_empty() {
            return Err(Error::argument(
                format!("stage {stage} has no devices"),
                format!("give stage {stage} at least one device"),
            ));
        }
        for &device in devices {
            if device >= cluster.devices() {
                return Err(Error::argument(
                    format!("stage {stage} names device {device}, but the cluster has {} devices", cluster.devices()),
                    format!("use device numbers from 0 to {}", cluster.devices() - 1),
                ));
            }
            if let Some(other) = stage_of[device as usize].replace(stage) {
                return Err(Error::argument(
                    if other == stage {
                        format!("stage {stage} names device {device} twice")
                    } else {
                        format!("device {device} is in stage {other} and in stage {stage}")
                    },
                    "give each device to one stage, and list it once",
                ));
            }
        }
    }
    Ok(devices.iter().map(|devices| cluster.footprint(devices)).collect())
}
