//! Pipeline schedules: an ordered list of actions for each pipeline rank, without times. `simulate` adds the times.
//!
//! A [`Schedule`] holds the placement of stages and the order of actions, but no seconds and no bytes. [`build`] makes
//! the published schedules by name from one table, [`FAMILIES`]. Other schedules are read from text.
//!
//! Notation, here and in every family: `p` pipeline ranks, `v` virtual stages per rank, `S = p v` stages,
//! `M` micro-batches, `r` a rank counted from 0. `F` is a forward pass and `B` a whole backward pass. A split backward
//! pass is `I` (input gradient) and `W` (weight gradient).
//! A micro-batch is *in flight* on a stage from its `F` until its activations are freed, after `B` or `W`.

use std::fmt;
use std::ops::Range;

use crate::error::{Error, Result};

mod bidirectional;
mod families;
mod family_table;
mod fill_drain;
mod interleaved;
mod names;
mod one_f_one_b;
mod request;
mod squeeze;
mod text;
mod v_shape;
mod validate;
mod wave;
mod weights;
mod zb_greedy;
mod zero_bubble;

pub use families::{Family, Synchronization, Uniform, VirtualStages};
pub use family_table::FAMILIES;
pub use names::{build, family};
pub use one_f_one_b::{eager_in_flight, one_f_one_b, one_f_one_b_in_flight};
pub use request::{Durations, MAX_ACTIONS, Request, Sizes};
pub use text::{Entry, Parameters};

/// Longest time that a caller may pass, in seconds. An `f64` of 10^15 has a resolution of 0.125 s, so sums of longer
/// times would lose the short ones.
pub(crate) const MAX_S: f64 = 1e15;

/// The computation that an action runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Kind {
    /// Forward pass of one micro-batch, `F`.
    Forward,
    /// Whole backward pass, `B`: input and weight gradient in one.
    Backward,
    /// Input gradient only, `I`.
    InputGradient,
    /// Weight gradient only, `W`.
    WeightGradient,
    /// A forward and a whole backward of different micro-batches run as one, `F‖B`.
    Overlapped,
}

impl Kind {
    /// Returns the letter of this kind in action strings. For an overlapped pair, which has no letter, returns `‖`.
    #[must_use]
    pub const fn letter(self) -> char {
        match self {
            Self::Forward => 'F',
            Self::Backward => 'B',
            Self::InputGradient => 'I',
            Self::WeightGradient => 'W',
            Self::Overlapped => '‖',
        }
    }
}

/// One action of a rank's list.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Action {
    /// The computation that the action runs.
    pub kind: Kind,
    /// Stage whose layers the action runs. For an overlapped pair, the stage of the forward.
    pub stage: u32,
    /// Micro-batch that the action processes. For an overlapped pair, the micro-batch of the forward.
    pub micro_batch: u32,
    /// `(stage, micro-batch)` of the backward of an overlapped pair. Equal to the two fields above for other actions.
    pub backward: (u32, u32),
}

impl Action {
    /// Creates an action that is not an overlapped pair.
    #[must_use]
    pub const fn new(kind: Kind, stage: u32, micro_batch: u32) -> Self {
        Self { kind, stage, micro_batch, backward: (stage, micro_batch) }
    }

    /// Creates the forward pass (`F`) of a micro-batch on a stage.
    #[must_use]
    pub const fn forward(stage: u32, micro_batch: u32) -> Self {
        Self::new(Kind::Forward, stage, micro_batch)
    }

    /// Creates the whole backward pass (`B`) of a micro-batch on a stage.
    #[must_use]
    pub const fn backward(stage: u32, micro_batch: u32) -> Self {
        Self::new(Kind::Backward, stage, micro_batch)
    }

    /// Creates the input-gradient pass (`I`) of a micro-batch on a stage.
    #[must_use]
    pub const fn input_gradient(stage: u32, micro_batch: u32) -> Self {
        Self::new(Kind::InputGradient, stage, micro_batch)
    }

    /// Creates the weight-gradient pass (`W`) of a micro-batch on a stage.
    #[must_use]
    pub const fn weight_gradient(stage: u32, micro_batch: u32) -> Self {
        Self::new(Kind::WeightGradient, stage, micro_batch)
    }

    /// Creates an overlapped pair (`F‖B`): the forward of one `(stage, micro-batch)` and the backward of another.
    #[must_use]
    pub const fn overlapped(forward: (u32, u32), backward: (u32, u32)) -> Self {
        Self { kind: Kind::Overlapped, stage: forward.0, micro_batch: forward.1, backward }
    }

    /// Iterates over the single passes of the action: the action itself, or the forward and then the backward of an
    /// overlapped pair.
    pub fn halves(self) -> impl Iterator<Item = Self> {
        let (first, second) = match self.kind {
            Kind::Overlapped => {
                (Self::forward(self.stage, self.micro_batch), Some(Self::backward(self.backward.0, self.backward.1)))
            }
            _ => (self, None),
        };
        std::iter::once(first).chain(second)
    }
}

/// Formats the action in PyTorch's notation: `2F0`, or `(0F7;7B3)OVERLAP_F_B`.
impl fmt::Display for Action {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            Kind::Overlapped => {
                write!(out, "({}F{};{}B{})OVERLAP_F_B", self.stage, self.micro_batch, self.backward.0, self.backward.1)
            }
            kind => write!(out, "{}{}{}", self.stage, kind.letter(), self.micro_batch),
        }
    }
}

/// The placement of stages on pipeline ranks, and the actions of each rank in order.
///
/// Stages form one or more *chains* of equal length. A chain is a pipeline replica: one copy of the whole model. Stages
/// `c * stages_per_pipeline .. (c + 1) * stages_per_pipeline` are chain `c`, and data flows from each stage to the next
/// inside its chain. Bidirectional schedules have two chains. Inference on alternating hosts has one chain for each
/// combination of hosts. All other schedules have one.
#[derive(Debug, Clone, PartialEq)]
pub struct Schedule {
    /// Name of the schedule in the literature, or the name that its text file gives.
    pub name: String,
    /// Number of stages in each chain.
    pub stages_per_pipeline: u32,
    /// Micro-batches that run through each chain. Indices are unique over all chains.
    pub micro_batches: Vec<Range<u32>>,
    /// Rank that runs each stage, by stage.
    pub rank_of_stage: Vec<u32>,
    /// Actions of each rank, in execution order, by rank.
    pub action_lists: Vec<Vec<Action>>,
    /// Synchronization of the ranks beyond the data that they exchange.
    pub synchronization: Synchronization,
    /// Number of weight versions that each rank keeps, by rank.
    pub weight_versions: Vec<u32>,
}

impl Schedule {
    /// Creates a schedule of one chain that runs micro-batches `0..micro_batches` and ends with a flush.
    #[must_use]
    pub fn of_one_chain(
        name: &str,
        micro_batches: u32,
        rank_of_stage: Vec<u32>,
        action_lists: Vec<Vec<Action>>,
    ) -> Self {
        Self {
            name: name.to_owned(),
            stages_per_pipeline: to_u32(rank_of_stage.len()),
            micro_batches: std::iter::once(0..micro_batches).collect(),
            rank_of_stage,
            weight_versions: vec![1; action_lists.len()],
            action_lists,
            synchronization: Synchronization::Flush,
        }
    }

    /// Joins `iterations` iterations of an asynchronous schedule into one: without a flush, each rank continues with
    /// the first micro-batch of the next iteration at once.
    ///
    /// Each rank keeps the warm-up depth of its action list. A schedule with a flush is returned unchanged.
    ///
    /// # Errors
    /// [`Error::Argument`] if `iterations` is 0, or there are more actions than [`MAX_ACTIONS`].
    pub fn without_flush(&self, iterations: u32) -> Result<Self> {
        let actions = self.action_count() as u64 * u64::from(iterations);
        if iterations == 0 || actions > MAX_ACTIONS {
            return Err(Error::argument(
                format!("{iterations} iterations have {actions} actions, but 1 to {MAX_ACTIONS} are supported"),
                "change the number of iterations or micro-batches",
            ));
        }
        if self.synchronization != Synchronization::Asynchronous {
            return Ok(self.clone());
        }
        // All asynchronous families are 1F1B with their own warm-up. The peak in flight of a 1F1B rank equals its
        // warm-up depth, so rebuilding 1F1B with these depths and more micro-batches gives the longer schedule.
        let longer = one_f_one_b(&self.peak_in_flight(), self.total_micro_batches() * iterations);
        Ok(Self { micro_batches: longer.micro_batches, action_lists: longer.action_lists, ..self.clone() })
    }

    /// Returns the number of pipeline ranks.
    #[must_use]
    pub fn ranks(&self) -> u32 {
        to_u32(self.action_lists.len())
    }

    /// Returns the number of stages over all chains.
    #[must_use]
    pub fn stages(&self) -> u32 {
        to_u32(self.rank_of_stage.len())
    }

    /// Returns the number of micro-batches over all chains.
    #[must_use]
    pub fn total_micro_batches(&self) -> u32 {
        self.micro_batches.iter().map(|range| range.end - range.start).sum()
    }

    /// Returns the number of actions over all ranks. An overlapped pair counts as one.
    #[must_use]
    pub fn action_count(&self) -> usize {
        self.action_lists.iter().map(Vec::len).sum()
    }

    /// Returns the largest number of virtual-stage activations that each rank holds at once. An activation is held from
    /// `F` to `B`, or to `W` where the backward is split. An overlapped pair holds both its activations while it runs.
    ///
    /// A rank runs one action at a time, so this number follows from the order alone and needs no durations.
    ///
    /// ```
    /// use hpgo::schedule::{Request, build};
    ///
    /// let schedule = build("1f1b", &Request::new(4, 8))?;
    /// assert_eq!(schedule.peak_in_flight(), [4, 3, 2, 1]);
    /// # Ok::<(), hpgo::Error>(())
    /// ```
    #[must_use]
    pub fn peak_in_flight(&self) -> Vec<u32> {
        let has_backward = self.action_lists.iter().flatten().any(|action| action.kind != Kind::Forward);
        if !has_backward {
            // Inference frees an activation as soon as it is sent, so a rank holds at most the one it computes.
            return self.action_lists.iter().map(|order| u32::from(!order.is_empty())).collect();
        }
        self.action_lists.iter().map(|order| peak_of(order)).collect()
    }
}

fn peak_of(order: &[Action]) -> u32 {
    let (mut held, mut peak) = (0_u32, 0_u32);
    for action in order {
        // Count the new activation before the freed one: an overlapped pair holds both while it runs.
        if matches!(action.kind, Kind::Forward | Kind::Overlapped) {
            held += 1;
            peak = peak.max(held);
        }
        if matches!(action.kind, Kind::Backward | Kind::WeightGradient | Kind::Overlapped) {
            held = held.saturating_sub(1);
        }
    }
    peak
}

/// Creates a schedule with one chain and one stage per rank, whose action lists `order` returns.
fn one_stage_each(name: &str, ranks: u32, micro_batches: u32, order: impl Fn(u32) -> Vec<Action>) -> Schedule {
    Schedule::of_one_chain(name, micro_batches, (0..ranks).collect(), (0..ranks).map(order).collect())
}

/// Returns the rank of each stage for looped placement, as in interleaved 1F1B: virtual stage `c` of rank `r` is stage
/// `c p + r`.
#[must_use]
pub fn loop_placement(ranks: u32, virtual_stages_per_rank: u32) -> Vec<u32> {
    (0..ranks * virtual_stages_per_rank).map(|stage| stage % ranks).collect()
}

/// Returns the rank of each stage for snake placement: down the ranks and up again. Two virtual stages per rank make a
/// V, more make a zigzag.
#[must_use]
pub fn snake_placement(ranks: u32, virtual_stages_per_rank: u32) -> Vec<u32> {
    (0..ranks * virtual_stages_per_rank)
        .map(|stage| if (stage / ranks).is_multiple_of(2) { stage % ranks } else { ranks - 1 - stage % ranks })
        .collect()
}

/// Converts a number of ranks or stages. Cannot fail: [`MAX_ACTIONS`] limits both far below 2^32.
fn to_u32(length: usize) -> u32 {
    u32::try_from(length).expect("fewer than 2^32 ranks and stages")
}
