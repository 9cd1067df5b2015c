//! The answers of the original HPGO planner: its plan families, its score, and its index errors. For compatibility
//! only.
//!
//! The original tries data parallelism on i·⌊n/i⌋ devices, two pipelines without data parallelism, and every split into
//! two stages, and scores each with one formula. Memory is never checked. Sums are for the global batch. Stages are
//! ranges of states whose end is exclusive, except for the last stage.

mod chain;
mod devices;
mod guide;
mod model;

pub use devices::Devices;
pub use guide::{Columns, columns};
pub use model::{Model, State};

use crate::control::Control;
use crate::error::{Error, Result};

/// A stage: consecutive states on some devices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stage {
    /// Index of the first state.
    pub start: usize,
    /// One more than the index of the last state. For the last stage, the index of the last state itself.
    pub end: usize,
    /// Replicas within one of the plan's [`Plan::replicas`] pipelines.
    pub replicas: u32,
    /// Devices, in ascending order.
    pub devices: Vec<u32>,
}

/// A plan of one family, with its score.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    /// Speed-up over one device that processes the same batch.
    pub speedup: f64,
    /// Stages from the first layers to the last.
    pub stages: Vec<Stage>,
    /// Number of pipelines that run side by side.
    pub replicas: u32,
}

/// Returns the best plan of each family, in the original's order: data parallelism, pipelines, two stages.
///
/// # Errors
/// Returns [`Error::Argument`] if `min_micro_batch_size` is 0 or above the global batch size, so that no plan has a
/// micro-batch, and [`Error::Cancelled`] if `control` was cancelled.
pub fn plans(model: &Model, devices: &Devices, min_micro_batch_size: u32, control: &Control) -> Result<Vec<Plan>> {
    if min_micro_batch_size == 0 || min_micro_batch_size > model.global_batch_size {
        return Err(Error::argument(
            format!(
                "min_micro_batch_size is {min_micro_batch_size}, but it must be from 1 to the global batch size, {}",
                model.global_batch_size
            ),
            "set it to 1 or more, but not above the global batch size",
        ));
    }
    let problem = LegacyProblem { model, devices, min_micro_batch_size };
    let count = devices.count();
    let mut plans: Vec<Plan> = (2..=count.max(2)).map(|parts| problem.data_parallel(parts.min(count))).collect();
    // The original tries two halves only for an even number of devices above two.
    if count > 2 && count.is_multiple_of(2) {
        plans.extend(problem.two_halves());
    }
    if count > 1 {
        plans.extend(problem.one_device_per_stage(control)?);
        plans.extend(problem.two_stages());
    }
    Ok(plans)
}

/// Returns the plan that the original returns: the fastest one and, of equals, the last.
#[must_use]
pub fn best(plans: &[Plan]) -> Option<&Plan> {
    plans.iter().max_by(|one, two| one.speedup.total_cmp(&two.speedup))
}

/// A planning problem of the original planner.
struct LegacyProblem<'a> {
    model: &'a Model,
    devices: &'a Devices,
    min_micro_batch_size: u32,
}

impl LegacyProblem<'_> {
    /// Returns the index of the last state.
    fn last(&self) -> usize {
        self.model.states.len() - 1
    }

    /// Returns the seconds of states `from..=to` on one device.
    fn compute_s(&self, from: usize, to: usize) -> f64 {
        let before = if from == 0 { 0.0 } else { self.model.states[from - 1].compute_s };
        self.model.states[to].compute_s - before
    }

    /// Returns the bytes of weights of states `from..=to`.
    fn parameter_bytes(&self, from: usize, to: usize) -> f64 {
        let before = if from == 0 { 0.0 } else { self.model.states[from - 1].parameter_bytes };
        self.model.states[to].parameter_bytes - before
    }

    /// Returns the plan with all states on `parts * (n / parts)` devices.
    fn data_parallel(&self, parts: u32) -> Plan {
        let pipelines = self.devices.count() / parts;
        let devices: Vec<u32> = (0..parts * pipelines).collect();
        let bottleneck_s = self.compute_s(0, self.last()) / f64::from(parts) / f64::from(pipelines);
        let stages = vec![Stage { start: 0, end: self.last(), replicas: parts, devices }];
        self.scored(bottleneck_s, stages, pipelines)
    }

    /// Returns the best plan with two stages, each on half of the devices. `None` if there is only one state.
    fn two_halves(&self) -> Option<Plan> {
        let half = self.devices.count() / 2;
        let first: Vec<u32> = (0..half).collect();
        let second: Vec<u32> = (half..2 * half).collect();
        let bottleneck_s = |cut: usize| {
            let transfer_s =
                self.devices.split_concat_s(&first, &second, 2.0 * self.model.states[cut].output_activation_bytes);
            let stage_s = self.compute_s(0, cut).max(self.compute_s(cut + 1, self.last())) / f64::from(half);
            stage_s.max(transfer_s)
        };
        // Of equal cuts the first one is taken. The original depends on memory addresses here and differs between
        // processes.
        let cut = (0..self.last()).min_by(|&one, &two| bottleneck_s(one).total_cmp(&bottleneck_s(two)))?;
        let stages = vec![
            Stage { start: 0, end: cut + 1, replicas: 1, devices: first.clone() },
            Stage { start: cut + 1, end: self.last(), replicas: 1, devices: second.clone() },
        ];
        Some(self.scored(bottleneck_s(cut), stages, half))
    }

    /// Returns the best plan with one stage on each device. `None` if fewer states are nested than there are devices.
    fn one_device_per_stage(&self, control: &Control) -> Result<Option<Plan>> {
        let Some(chain) = chain::best(self.model, self.devices, control)? else { return Ok(None) };
        let last = chain.stages.len() - 1;
        let stages = chain.stages.iter().enumerate().map(|(index, &(to, device))| {
            let start = if index == 0 { 0 } else { chain.stages[index - 1].0 + 1 };
            Stage { start, end: if index == last { to } else { to + 1 }, replicas: 1, devices: vec![device] }
        });
        Ok(Some(self.scored(chain.bottleneck_s, stages.collect(), 1)))
    }

    /// Returns the best of all splits of states and devices in two.
    fn two_stages(&self) -> Option<Plan> {
        let count = self.devices.count();
        let mut best: Option<Plan> = None;
        for first_count in 1..count {
            let in_order: Vec<u32> = (0..first_count).collect();
            // Scattered over the nodes first, then in order: of equal scores, the original keeps the one tried last.
            let mut placements = vec![self.devices.scattered(first_count), in_order];
            placements.dedup();
            for first in placements {
                let second: Vec<u32> = (0..count).filter(|device| first.binary_search(device).is_err()).collect();
                let (in_first, in_second) = (f64::from(first_count), f64::from(count - first_count));
                let mut stages = vec![
                    Stage { start: 0, end: 0, replicas: first_count, devices: first },
                    Stage { start: 0, end: self.last(), replicas: count - first_count, devices: second },
                ];
                let rates = self.rates(&stages);
                for cut in 0..self.last() {
                    let bytes = self.model.states[cut].output_activation_bytes;
                    let bottleneck_s = (self.compute_s(0, cut) / in_first)
                        .max(self.compute_s(cut + 1, self.last()) / in_second)
                        .max(bytes * rates[0].send_s);
                    (stages[0].end, stages[1].start) = (cut + 1, cut + 1);
                    let speedup = self.speedup(bottleneck_s, &stages, &rates, 1);
                    if best.as_ref().is_none_or(|best| speedup >= best.speedup) {
                        best = Some(Plan { speedup, stages: stages.clone(), replicas: 1 });
                    }
                }
            }
        }
        best
    }

    /// Builds a plan with its score.
    fn scored(&self, bottleneck_s: f64, stages: Vec<Stage>, replicas: u32) -> Plan {
        let speedup = self.speedup(bottleneck_s, &stages, &self.rates(&stages), replicas);
        Plan { speedup, stages, replicas }
    }

    /// Returns the times per byte of each stage.
    fn rates(&self, stages: &[Stage]) -> Vec<StageRates> {
        let receivers = |index: usize| stages.get(index + 1).map(|next| next.devices.as_slice());
        let rate = |(index, stage): (usize, &Stage)| StageRates {
            all_reduce_s: self.devices.all_reduce_s(&stage.devices, 1.0),
            send_s: receivers(index).map_or(0.0, |next| self.devices.split_concat_s(&stage.devices, next, 1.0)),
        };
        stages.iter().enumerate().map(rate).collect()
    }

    /// Returns the score of a plan, or 0 if a pipeline gets no micro-batch.
    fn speedup(&self, bottleneck_s: f64, stages: &[Stage], rates: &[StageRates], replicas: u32) -> f64 {
        let micro_batches = self.model.global_batch_size / replicas / self.min_micro_batch_size;
        if micro_batches == 0 {
            return 0.0;
        }
        let count = f64::from(micro_batches);
        // Bottlenecks are for the whole batch, as in the original, so divide by the number of micro-batches.
        let block_s = bottleneck_s / count;
        let total_s = self.compute_s(0, self.last());
        // One micro-batch passes all stages, and each further one takes as long as the slowest stage or transfer.
        let mut length_s = block_s * (count - 1.0) + total_s / f64::from(replicas) / count;
        let mut tail_s = 0.0_f64;
        for (index, (stage, rate)) in stages.iter().zip(rates).enumerate() {
            if index + 1 < stages.len() {
                let cut_bytes = self.model.states[stage.end - 1].output_activation_bytes / f64::from(replicas) / count;
                length_s += cut_bytes * rate.send_s;
            }
            // `end` is exclusive for all stages except the last one, so this counts one state too many, as the original
            // does.
            let bytes = self.parameter_bytes(stage.start, stage.end);
            // A stage at index i may reduce its gradients while the last backward passes of the stages in front of it
            // run.
            tail_s = tail_s.max(bytes * rate.all_reduce_s - index as f64 * block_s);
        }
        total_s / (length_s + tail_s)
    }
}

/// Times per byte of a stage, in seconds.
struct StageRates {
    /// Seconds per byte of an all-reduce among the stage's devices.
    all_reduce_s: f64,
    /// Seconds per byte of a transfer to the next stage.
    send_s: f64,
}
