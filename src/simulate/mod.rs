//! Simulation of a schedule: start and end of every action, on stages and links of given cost.
//!
//! [`fast_simulation`] runs fixed action lists in time linear in the number of actions. [`events`] runs every mode of
//! communication with a heap of events. Both return [`Times`], from which [`measures`] derives all results. All times
//! are in seconds.

pub mod communication;
pub mod events;
pub mod fast_simulation;
mod lock_step;
pub mod measures;

use crate::control::Control;
use crate::error::{Error, Result};
use crate::schedule::{Action, Kind, MAX_S, Schedule, Synchronization};

pub use fast_simulation::{Links, Sweep};
pub use measures::{Cause, Idle, Measures, StageBytes, idle, measure, memory, slack_s};

/// Durations of the passes of one micro-batch on one stage.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StageTimes {
    /// Duration of a forward pass, `F`, in seconds.
    pub forward_s: f64,
    /// Duration of a whole backward pass, `B`, in seconds.
    pub backward_s: f64,
    /// Duration of an input-gradient pass, `I`, in seconds.
    pub input_gradient_s: f64,
    /// Duration of a weight-gradient pass, `W`, in seconds.
    pub weight_gradient_s: f64,
    /// Duration of an overlapped pair: a forward of this stage fused with a backward of any stage of the rank. `None`
    /// means the sum of the two.
    pub overlapped_s: Option<f64>,
}

impl StageTimes {
    /// Creates durations from a forward and a whole backward pass. Each of the two gradients takes half of the
    /// backward.
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

/// The cost of one message between two ranks.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Transfer {
    /// Time that the message occupies its link, in seconds: bytes divided by bandwidth.
    pub busy_s: f64,
    /// Time after that until the message arrives, in seconds. The link is free during this time.
    pub latency_s: f64,
}

/// The costs of a schedule on a cluster. Each vector has one entry per stage of the schedule, over all chains.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Costs {
    /// Durations of passes: one row per stage, or `[micro-batch][stage]` with one row for each pair.
    pub compute: Vec<StageTimes>,
    /// Transfer of the stage's output to the next stage. The entry of a chain's last stage is unused.
    pub activation: Vec<Transfer>,
    /// Transfer of the gradient of that output back to the stage. The entry of a chain's last stage is unused.
    pub gradient: Vec<Transfer>,
    /// Exposed gradient reduction over the stage's replicas, in seconds: the part after the stage's last backward. It
    /// runs in parallel with computation.
    pub gradient_sync_s: Vec<f64>,
    /// Optimizer step after the gradient reduction, in seconds.
    pub optimizer_s: Vec<f64>,
}

impl Costs {
    /// Creates the costs of stages that only compute. Transfers, gradient reduction and optimizer step take no time.
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

    /// Checks the lengths against `schedule`, and that every time is a number from 0.
    ///
    /// # Errors
    /// [`Error::Argument`] with the list, the stage and the number.
    pub fn check(&self, schedule: &Schedule) -> Result<()> {
        let stages = schedule.rank_of_stage.len();
        let micro_batches = schedule.total_micro_batches() as usize;
        let rows = self.compute.len();
        if rows != stages && rows != stages * micro_batches {
            return Err(Error::argument(
                format!(
                    "compute times have {rows} rows, but the schedule has {stages} stages and {micro_batches} \
                     micro-batches"
                ),
                "give one row for each stage, or one for each micro-batch and stage",
            ));
        }
        for (name, length) in [
            ("activation transfers", self.activation.len()),
            ("gradient transfers", self.gradient.len()),
            ("gradient reduction times", self.gradient_sync_s.len()),
            ("optimizer times", self.optimizer_s.len()),
        ] {
            if length != stages {
                return Err(Error::argument(
                    format!("there are {length} {name}, but the schedule has {stages} stages"),
                    "give one entry for each stage",
                ));
            }
        }
        // The range check also rejects NaN, which would break the ordering of events.
        let check = |name: &str, row: usize, time_s: f64| {
            if (0.0..=MAX_S).contains(&time_s) {
                return Ok(());
            }
            Err(Error::argument(
                format!("{name} of stage {} is {time_s:?} s", row % stages),
                format!("give a number of seconds from 0 to {MAX_S:e}"),
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
            check("the gradient reduction", stage, self.gradient_sync_s[stage])?;
            check("the optimizer step", stage, self.optimizer_s[stage])?;
        }
        Ok(())
    }
}

/// Model of communication between ranks. `communication` builds the lists of sends and receives for the last two.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Communication {
    /// Asynchronous messages. Each has its link for itself.
    Latency,
    /// Asynchronous messages. Each link transfers one message at a time, in the order in which they are sent.
    Link,
    /// Each rank has one in-order stream of sends and receives beside its computation, as NCCL runs point-to-point
    /// calls. A receive that is posted early blocks the sends behind it. A send occupies the stream while it occupies
    /// the link, and doesn't wait for its receive.
    Stream {
        /// Whether receives are posted right before the action that needs them. Otherwise they are posted when the
        /// sender has sent.
        deferred_receives: bool,
    },
    /// Blocking messages: between two actions, a rank sends the output of the first, receives the input of the second,
    /// and waits for both.
    Rendezvous,
}

/// Simulates `iterations` steps of `schedule` one after the other.
///
/// A rank starts its next step when the optimizer steps of all its stages have ended. [`Schedule::without_flush`]
/// builds schedules that don't wait. A schedule in lock-step communicates between its steps and ignores
/// `communication`.
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
/// [`Error::Argument`] if `costs` doesn't match the schedule, [`Error::Schedule`] if actions or messages deadlock, and
/// [`Error::Cancelled`] if `control` is cancelled.
pub fn simulate(
    schedule: &Schedule,
    costs: &Costs,
    communication: Communication,
    iterations: u32,
    control: &Control,
) -> Result<Times> {
    // In lock step, all messages of a step end with it. Links never queue, so the mode of communication has no effect.
    if schedule.synchronization == Synchronization::LockStep {
        return lock_step::times(schedule, costs, iterations);
    }
    match (communication, iterations) {
        // The fast simulation covers one step with asynchronous messages. All other cases need the event heap: several
        // steps, and ranks that wait for their own messages.
        (Communication::Latency, 1) => Sweep::default().times(schedule, costs, Links::Free),
        (Communication::Link, 1) => Sweep::default().times(schedule, costs, Links::Queued),
        _ => events::times(schedule, costs, communication, iterations, control),
    }
}

/// Start and end of all actions. Actions are ordered by rank, then by iteration, then as in the schedule.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Times {
    /// Number of simulated steps.
    pub iterations: u32,
    /// Offsets into the two vectors below. Rank `r` owns the entries `offsets[r]..offsets[r + 1]`.
    pub offsets: Vec<usize>,
    /// Start of each action, in seconds.
    pub start_s: Vec<f64>,
    /// End of each action, in seconds.
    pub end_s: Vec<f64>,
    /// Arrival of the input of each action at its rank in seconds, by iteration and [`Inputs`]. A stream may receive it
    /// later.
    pub arrival_s: Vec<f64>,
    /// End of the last backward of each stage in seconds, by `[iteration][stage]`. Negative infinity if it has none.
    pub last_backward_s: Vec<f64>,
    /// End of the simulation in seconds: of the last action, or of the last optimizer step if that is later.
    pub step_s: f64,
}

impl Times {
    /// Returns the time in seconds at which the gradient reduction of a stage starts: after the last backward of the
    /// stage and of its copies in other chains. Negative infinity if there is none.
    #[must_use]
    pub fn synchronized_from_s(&self, schedule: &Schedule, iteration: usize, stage: usize) -> f64 {
        let (chain, stages) = (schedule.stages_per_pipeline as usize, schedule.rank_of_stage.len());
        // Copies of a stage hold the same weights, so their gradients are reduced together.
        let copies = (stage % chain..stages).step_by(chain);
        copies.map(|copy| self.last_backward_s[iteration * stages + copy]).fold(f64::NEG_INFINITY, f64::max)
    }
}

/// Indices of the inputs of all actions of a step: forwards by `[micro-batch][stage]`, then backwards in the same
/// order.
#[derive(Debug, Clone, Copy)]
pub struct Inputs {
    stages: usize,
    chain: usize,
    slots: usize,
}

impl Inputs {
    /// Creates the indices for one schedule.
    #[must_use]
    pub fn of(schedule: &Schedule) -> Self {
        let stages = schedule.rank_of_stage.len();
        Self {
            stages,
            chain: schedule.stages_per_pipeline as usize,
            slots: stages * schedule.total_micro_batches() as usize,
        }
    }

    /// Returns the number of inputs of a step.
    #[must_use]
    pub fn count(self) -> usize {
        2 * self.slots
    }

    /// Iterates over the inputs that an action needs before it starts. Weight gradients need none: their place in the
    /// action list is enough.
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

    /// Returns the input that the end of an action makes available: the next stage's forward, the backward of the same
    /// stage at the end of the chain, or the backward of the stage before. The action must not be an overlapped pair.
    #[must_use]
    pub fn made_ready_by(self, action: Action) -> Option<usize> {
        let stage = action.stage as usize;
        let slot = action.micro_batch as usize * self.stages + stage;
        match action.kind {
            Kind::Forward if (stage + 1).is_multiple_of(self.chain) => Some(self.slots + slot),
            Kind::Forward => Some(slot + 1),
            Kind::Backward | Kind::InputGradient if !stage.is_multiple_of(self.chain) => Some(self.slots + slot - 1),
            // A weight gradient stays on its rank, and there is no stage before the first one.
            _ => None,
        }
    }

    /// Returns whether an input is a gradient, then its stage and its micro-batch.
    #[must_use]
    pub fn describe(self, input: usize) -> (bool, usize, usize) {
        let slot = input % self.slots;
        (input >= self.slots, slot % self.stages, slot / self.stages)
    }
}

impl Costs {
    /// Returns the duration of an action in seconds.
    #[must_use]
    pub fn duration_s(&self, action: Action) -> f64 {
        // `compute` may have a row per micro-batch, so take the number of stages from another list.
        let stages = self.gradient_sync_s.len();
        // A stride of 0 lets one row per stage serve all micro-batches, without copies of the rows.
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
