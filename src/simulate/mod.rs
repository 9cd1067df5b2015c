//! Gives a schedule a clock: who runs what from when to when, on stages and links of given cost.
//!
//! `sweep` runs static orders in time linear in the actions; `events` runs anything on a heap of events. Both give
//! [`Times`], which `measures` reads. All times are seconds.

pub mod communication;
pub mod events;
pub mod fast_simulation;
mod lock_step;
pub mod measures;

use crate::control::Control;
use crate::error::{Error, Result};
use crate::schedule::{Action, Kind, LONGEST_S, Pace, Schedule};

pub use fast_simulation::{Links, Sweep};
pub use measures::{Cause, Idle, Measures, StageBytes, idle, measure, memory, slack_s};

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
            if (0.0..=LONGEST_S).contains(&time_s) {
                return Ok(());
            }
            Err(Error::argument(
                format!("{name} of stage {} is {time_s:?} s", row % stages),
                format!("times are numbers of seconds from 0 to {LONGEST_S:e}"),
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

/// How messages travel. See `communication` for the lists of sends and receives behind the last two.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Communication {
    /// Asynchronous; every message has its link for itself.
    Latency,
    /// Asynchronous; each link takes one message after the other, in the order in which they are sent.
    Link,
    /// One in-order stream of sends and receives a rank, beside the compute lane, as NCCL runs point-to-point calls: a
    /// receive that is posted early blocks the sends behind it. A send occupies the stream while the link is busy with
    /// it, and doesn't wait for its receive.
    Stream {
        /// Receives are posted right before the action that needs them, rather than as soon as the sender has sent.
        deferred_receives: bool,
    },
    /// Blocking: between two actions a rank sends the output of the first, receives the input of the second, and waits
    /// for both.
    Rendezvous,
}

/// Runs `iterations` steps of `schedule` one after the other.
///
/// A rank starts its next step when the optimizer steps of all its stages have ended; see [`Schedule::without_flush`]
/// for schedules that don't wait. A schedule in lock step communicates between its steps, whatever `communication` says.
///
/// ```
/// use hpgo::schedule::{Request, build};
/// use hpgo::Control;
/// use hpgo::simulate::{Communication, Costs, StageTimes, simulate};
///
/// let schedule = build("1f1b", &Request::new(4, 8))?;
/// let costs = Costs::of_stages(vec![StageTimes::new(1.0, 2.0); 4]);
/// let times = simulate(&schedule, &costs, Communication::Link, 1, &Control::default())?;
/// assert_eq!(times.step_s, 33.0);
/// # Ok::<(), hpgo::Error>(())
/// ```
///
/// # Errors
/// [`Error::Argument`] if `costs` doesn't fit the schedule, [`Error::Schedule`] if actions or messages wait for each
/// other for ever, [`Error::Cancelled`] if `control` says so.
pub fn simulate(
    schedule: &Schedule,
    costs: &Costs,
    communication: Communication,
    iterations: u32,
    control: &Control,
) -> Result<Times> {
    if schedule.pace == Pace::LockStep {
        return lock_step::times(schedule, costs, iterations);
    }
    match (communication, iterations) {
        (Communication::Latency, 1) => Sweep::default().times(schedule, costs, Links::Free),
        (Communication::Link, 1) => Sweep::default().times(schedule, costs, Links::Queued),
        _ => events::times(schedule, costs, communication, iterations, control),
    }
}

/// When everything happens. Actions lie rank by rank in the order of the schedule, iteration after iteration.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Times {
    /// Steps that were run.
    pub iterations: u32,
    /// Rank `r` owns the entries `offsets[r]..offsets[r + 1]` of the two vectors below.
    pub offsets: Vec<usize>,
    /// Start of each action.
    pub start_s: Vec<f64>,
    /// End of each action.
    pub end_s: Vec<f64>,
    /// When the input of each action came to its rank, by [`Inputs`], iteration after iteration; a stream may receive it
    /// later.
    pub arrival_s: Vec<f64>,
    /// When the last backward of each stage ended, `[iteration][stage]`; negative infinity if it has none.
    pub last_backward_s: Vec<f64>,
    /// The end of everything: the last action, or the last optimizer step behind its synchronisation.
    pub step_s: f64,
}

impl Times {
    /// From when the gradients of a stage are synchronised: the last backward of it and of its copies in other chains.
    /// Negative infinity if there is none.
    #[must_use]
    pub fn synchronised_from_s(&self, schedule: &Schedule, iteration: usize, stage: usize) -> f64 {
        let (chain, stages) = (schedule.chain_length as usize, schedule.rank_of_stage.len());
        let copies = (stage % chain..stages).step_by(chain);
        copies.map(|copy| self.last_backward_s[iteration * stages + copy]).fold(f64::NEG_INFINITY, f64::max)
    }
}

/// Numbers the inputs of all actions of a step: forwards `[micro-batch][stage]`, then backwards alike.
#[derive(Debug, Clone, Copy)]
pub struct Inputs {
    stages: usize,
    chain: usize,
    slots: usize,
}

impl Inputs {
    /// The numbering for one schedule.
    #[must_use]
    pub fn of(schedule: &Schedule) -> Self {
        let stages = schedule.rank_of_stage.len();
        Self { stages, chain: schedule.chain_length as usize, slots: stages * schedule.total_micro_batches() as usize }
    }

    /// How many there are.
    #[must_use]
    pub fn count(self) -> usize {
        2 * self.slots
    }

    /// What an action must have before it starts; weight gradients need nothing but their place in the order.
    pub fn of_action(self, action: Action) -> impl Iterator<Item = usize> {
        action.halves().filter_map(move |half| {
            let slot = half.micro_batch as usize * self.stages + half.stage as usize;
            match half.kind {
                Kind::Forward => Some(slot),
                Kind::Backward | Kind::InputGradient => Some(self.slots + slot),
                Kind::WeightGradient | Kind::Overlapped => None,
            }
        })
    }

    /// What the end of an action (not an overlapped pair) makes ready: the next stage's forward, the backward of the
    /// same stage where the chain turns around, or the backward of the stage before.
    #[must_use]
    pub fn made_ready_by(self, action: Action) -> Option<usize> {
        let stage = action.stage as usize;
        let slot = action.micro_batch as usize * self.stages + stage;
        match action.kind {
            Kind::Forward if (stage + 1).is_multiple_of(self.chain) => Some(self.slots + slot),
            Kind::Forward => Some(slot + 1),
            Kind::Backward | Kind::InputGradient if !stage.is_multiple_of(self.chain) => Some(self.slots + slot - 1),
            _ => None,
        }
    }

    /// Whether an input is a gradient, its stage and its micro-batch.
    #[must_use]
    pub fn describe(self, input: usize) -> (bool, usize, usize) {
        let slot = input % self.slots;
        (input >= self.slots, slot % self.stages, slot / self.stages)
    }
}

impl Costs {
    /// Seconds that an action takes.
    #[must_use]
    pub fn duration_s(&self, action: Action) -> f64 {
        let stages = self.gradient_sync_s.len();
        let stride = if self.compute.len() == stages { 0 } else { stages };
        let row = |stage: u32, micro_batch: u32| &self.compute[micro_batch as usize * stride + stage as usize];
        let times = row(action.stage, action.micro_batch);
        match action.kind {
            Kind::Forward => times.forward_s,
            Kind::Backward => times.backward_s,
            Kind::InputGradient => times.input_gradient_s,
            Kind::WeightGradient => times.weight_gradient_s,
            Kind::Overlapped => {
                let backward = row(action.backward.0, action.backward.1);
                times.overlapped_s.unwrap_or(times.forward_s + backward.backward_s)
            }
        }
    }
}
