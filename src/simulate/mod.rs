//! Gives a schedule a clock: who runs what from when to when, on stages and links of given cost.
//!
//! `sweep` runs static orders in time linear in the actions. All times are seconds.

pub mod sweep;

use crate::error::{Error, Result};
use crate::schedule::Schedule;

pub use sweep::{Links, Sweep};

/// Seconds that one micro-batch takes on one stage.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StageTimes {
    /// Forward pass, `F`.
    pub forward_s: f64,
    /// Whole backward pass, `B`.
    pub backward_s: f64,
    /// Input gradient alone, `I`.
    pub input_gradient_s: f64,
    /// Weight gradient alone, `W`.
    pub weight_gradient_s: f64,
    /// A forward of this stage run as one with a backward of any stage of the rank; `None`: the sum of the two.
    pub overlapped_s: Option<f64>,
}

impl StageTimes {
    /// From a forward and a whole backward pass; the two gradients take half of the backward each.
    #[must_use]
    pub fn new(forward_s: f64, backward_s: f64) -> Self {
        Self {
            forward_s,
            backward_s,
            input_gradient_s: backward_s / 2.0,
            weight_gradient_s: backward_s / 2.0,
            overlapped_s: None,
        }
    }
}

/// What one message costs.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Transfer {
    /// How long it occupies its link: bytes over bandwidth.
    pub busy_s: f64,
    /// Delay behind that, during which the link is free again.
    pub latency_s: f64,
}

/// What a schedule costs on a cluster. Vectors have one entry for each stage of the schedule, all chains included.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Costs {
    /// One row for each stage, or `[micro-batch][stage]` with one row for each pair.
    pub compute: Vec<StageTimes>,
    /// Output of the stage on its way to the next one; the entry of a chain's last stage is not used.
    pub activation: Vec<Transfer>,
    /// Gradient of that output on its way back; the entry of a chain's last stage is not used.
    pub gradient: Vec<Transfer>,
    /// Gradient synchronisation of the stage's replicas that remains after the stage's last backward. It runs beside
    /// the compute lane.
    pub gradient_sync_s: Vec<f64>,
    /// Optimizer step behind it.
    pub optimizer_s: Vec<f64>,
}

impl Costs {
    /// Costs of stages that only compute: transfers, synchronisation and optimizer take no time.
    #[must_use]
    pub fn of_stages(compute: Vec<StageTimes>) -> Self {
        let stages = compute.len();
        Self {
            compute,
            activation: vec![Transfer::default(); stages],
            gradient: vec![Transfer::default(); stages],
            gradient_sync_s: vec![0.0; stages],
            optimizer_s: vec![0.0; stages],
        }
    }

    /// Checks lengths against `schedule`, and that every time is a number that is not negative.
    ///
    /// # Errors
    /// [`Error::Argument`] naming the list, the place and the number.
    pub fn check(&self, schedule: &Schedule) -> Result<()> {
        let stages = schedule.rank_of_stage.len();
        let micro_batches = schedule.total_micro_batches() as usize;
        let rows = self.compute.len();
        if rows != stages && rows != stages * micro_batches {
            return Err(Error::argument(
                format!(
                    "compute times have {rows} rows, but the schedule has {stages} stages and {micro_batches} micro-batches"
                ),
                "give one row for each stage, or one for each micro-batch and stage",
            ));
        }
        for (name, length) in [
            ("activation transfers", self.activation.len()),
            ("gradient transfers", self.gradient.len()),
            ("gradient synchronisation times", self.gradient_sync_s.len()),
            ("optimizer times", self.optimizer_s.len()),
        ] {
            if length != stages {
                return Err(Error::argument(
                    format!("there are {length} {name}, but the schedule has {stages} stages"),
                    "give one for each stage",
                ));
            }
        }
        let check = |name: &str, row: usize, time_s: f64| {
            if time_s >= 0.0 && time_s.is_finite() {
                return Ok(());
            }
            Err(Error::argument(
                format!("{name} of stage {} is {time_s} s", row % stages),
                "times are finite numbers of seconds, zero or more",
            ))
        };
        for (row, times) in self.compute.iter().enumerate() {
            check("the forward time", row, times.forward_s)?;
            check("the backward time", row, times.backward_s)?;
            check("the input-gradient time", row, times.input_gradient_s)?;
            check("the weight-gradient time", row, times.weight_gradient_s)?;
            check("the overlapped time", row, times.overlapped_s.unwrap_or(0.0))?;
        }
        for stage in 0..stages {
            for (name, transfer) in [("activation", self.activation[stage]), ("gradient", self.gradient[stage])] {
                check(&format!("the time on the link of the {name}"), stage, transfer.busy_s)?;
                check(&format!("the latency of the {name}"), stage, transfer.latency_s)?;
            }
            check("the gradient synchronisation", stage, self.gradient_sync_s[stage])?;
            check("the optimizer step", stage, self.optimizer_s[stage])?;
        }
        Ok(())
    }
}

/// When everything happens. Actions lie rank by rank in the order of the schedule.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Times {
    /// Rank `r` owns the entries `offsets[r]..offsets[r + 1]` of the two vectors below.
    pub offsets: Vec<usize>,
    /// Start of each action.
    pub start_s: Vec<f64>,
    /// End of each action.
    pub end_s: Vec<f64>,
    /// For each stage, when its last backward ended and its gradients are synchronised from; 0 if it has none.
    pub last_backward_s: Vec<f64>,
    /// The end of everything: the last action, or the last optimizer step behind its synchronisation.
    pub step_s: f64,
}
