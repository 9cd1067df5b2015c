//! Schedules: for each rank an ordered list of actions, without a clock. `simulate` gives them one.
//!
//! A [`Schedule`] says who does what in which order and nothing else: no seconds, no bytes. The families that the
//! literature knows are built by name with [`build`] from one table, [`FAMILIES`]; anything else comes from text.
//!
//! Notation, here and in every family: `p` ranks, `v` chunks (stages) a rank, `S = p v` stages, `M` micro-batches, `r` a
//! rank counted from 0. `F` forward, `B` whole backward, split into `I` (input gradient) and `W` (weight gradient).
//! A micro-batch is *in flight* on a stage from its `F` until the activations are freed, after `B` or `W`.

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

pub use families::{Chunks, Family, Pace, Uniform};
pub use family_table::FAMILIES;
pub use names::{build, family};
pub use one_f_one_b::{eager_in_flight, one_f_one_b, one_f_one_b_in_flight};
pub use request::{Durations, MOST_ACTIONS, Request, Sizes};
pub use text::{Entry, Parameters};

/// Longer times are refused: their sums lose what short ones add.
pub(crate) const LONGEST_S: f64 = 1e15;

/// What an action does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Kind {
    /// Forward pass, `F`.
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
    /// The letter that stands for it in action strings; an overlapped pair has none of its own.
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

/// One entry of a rank's list.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Action {
    /// What it does.
    pub kind: Kind,
    /// Which stage's layers it runs; the forward half's if overlapped.
    pub stage: u32,
    /// Which micro-batch; the forward half's if overlapped.
    pub micro_batch: u32,
    /// `(stage, micro-batch)` of the backward half; equal to the fields above unless overlapped.
    pub backward: (u32, u32),
}

impl Action {
    /// An action that is not an overlapped pair.
    #[must_use]
    pub const fn new(kind: Kind, stage: u32, micro_batch: u32) -> Self {
        Self { kind, stage, micro_batch, backward: (stage, micro_batch) }
    }

    /// `F` of a micro-batch on a stage.
    #[must_use]
    pub const fn forward(stage: u32, micro_batch: u32) -> Self {
        Self::new(Kind::Forward, stage, micro_batch)
    }

    /// `B` of a micro-batch on a stage.
    #[must_use]
    pub const fn backward(stage: u32, micro_batch: u32) -> Self {
        Self::new(Kind::Backward, stage, micro_batch)
    }

    /// `I` of a micro-batch on a stage.
    #[must_use]
    pub const fn input_gradient(stage: u32, micro_batch: u32) -> Self {
        Self::new(Kind::InputGradient, stage, micro_batch)
    }

    /// `W` of a micro-batch on a stage.
    #[must_use]
    pub const fn weight_gradient(stage: u32, micro_batch: u32) -> Self {
        Self::new(Kind::WeightGradient, stage, micro_batch)
    }

    /// `F‖B`: the forward of one `(stage, micro-batch)` and the backward of another, run as one.
    #[must_use]
    pub const fn overlapped(forward: (u32, u32), backward: (u32, u32)) -> Self {
        Self { kind: Kind::Overlapped, stage: forward.0, micro_batch: forward.1, backward }
    }

    /// The plain actions it consists of: itself, or the forward and the backward of an overlapped pair.
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

/// As PyTorch writes it: `2F0`, or `(0F7;7B3)OVERLAP_F_B`.
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

/// Who does what in which order.
///
/// Stages form one or more *chains* of equal length, each a copy of the whole model: stages
/// `c * chain_length .. (c + 1) * chain_length` are chain `c`, and data flows from each stage to the next inside its
/// chain. Bidirectional schedules have two chains, inference on hosts that take turns one for each combination of
/// hosts, all others one.
#[derive(Debug, Clone, PartialEq)]
pub struct Schedule {
    /// The field's name for it.
    pub name: String,
    /// Stages in a chain.
    pub chain_length: u32,
    /// Micro-batches that run through each chain; ids are unique over all chains.
    pub micro_batches: Vec<Range<u32>>,
    /// For each stage, the rank that runs it.
    pub rank_of_stage: Vec<u32>,
    /// For each rank, its actions in order.
    pub orders: Vec<Vec<Action>>,
    /// What ranks wait for beyond the data they exchange.
    pub pace: Pace,
    /// For each rank, how many versions of its weights it keeps.
    pub weight_versions: Vec<u32>,
}

impl Schedule {
    /// A schedule of one chain, through which micro-batches `0..micro_batches` run, with a flush behind them.
    #[must_use]
    pub fn of_one_chain(name: &str, micro_batches: u32, rank_of_stage: Vec<u32>, orders: Vec<Vec<Action>>) -> Self {
        Self {
            name: name.to_owned(),
            chain_length: to_u32(rank_of_stage.len()),
            micro_batches: std::iter::once(0..micro_batches).collect(),
            rank_of_stage,
            weight_versions: vec![1; orders.len()],
            orders,
            pace: Pace::Flush,
        }
    }

    /// `iterations` iterations as one: without a flush a rank goes on with the next micro-batch at once.
    ///
    /// The warm-up of each rank is that of its order; a schedule that does flush stays as it is. Only 1F1B has families
    /// without a flush.
    ///
    /// # Errors
    /// [`Error::Argument`] if there is no iteration, or there are more actions than [`MOST_ACTIONS`].
    pub fn without_flush(&self, iterations: u32) -> Result<Self> {
        let actions = self.action_count() as u64 * u64::from(iterations);
        if iterations == 0 || actions > MOST_ACTIONS {
            return Err(Error::argument(
                format!("{iterations} iterations have {actions} actions"),
                format!("ask for at least one iteration and at most {MOST_ACTIONS} actions"),
            ));
        }
        if self.pace != Pace::Asynchronous {
            return Ok(self.clone());
        }
        let longer = one_f_one_b(&self.peak_in_flight(), self.total_micro_batches() * iterations);
        Ok(Self { micro_batches: longer.micro_batches, orders: longer.orders, ..self.clone() })
    }

    /// Number of ranks.
    #[must_use]
    pub fn ranks(&self) -> u32 {
        to_u32(self.orders.len())
    }

    /// Number of stages over all chains.
    #[must_use]
    pub fn stages(&self) -> u32 {
        to_u32(self.rank_of_stage.len())
    }

    /// Number of micro-batches over all chains.
    #[must_use]
    pub fn total_micro_batches(&self) -> u32 {
        self.micro_batches.iter().map(|range| range.end - range.start).sum()
    }

    /// Number of entries in all orders; an overlapped pair is one.
    #[must_use]
    pub fn action_count(&self) -> usize {
        self.orders.iter().map(Vec::len).sum()
    }

    /// Most chunk activations that each rank holds at once: counted from `F` to `B`, or to `W` where the backward is
    /// split. An overlapped pair holds both its activations while it runs.
    ///
    /// A rank works on one action at a time, so the order alone decides this; no clock is needed.
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
        let has_backward = self.orders.iter().flatten().any(|action| action.kind != Kind::Forward);
        if !has_backward {
            // Inference frees an activation as soon as it is passed on.
            return self.orders.iter().map(|order| u32::from(!order.is_empty())).collect();
        }
        self.orders.iter().map(|order| peak_of(order)).collect()
    }
}

fn peak_of(order: &[Action]) -> u32 {
    let (mut held, mut peak) = (0_u32, 0_u32);
    for action in order {
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

/// One chain of one stage a rank, each with the order that `order` gives for it.
fn one_stage_each(name: &str, ranks: u32, micro_batches: u32, order: impl Fn(u32) -> Vec<Action>) -> Schedule {
    Schedule::of_one_chain(name, micro_batches, (0..ranks).collect(), (0..ranks).map(order).collect())
}

/// Chunk `c` of rank `r` is stage `c p + r`: round and round, as interleaved 1F1B places them.
#[must_use]
pub fn loop_placement(ranks: u32, chunks: u32) -> Vec<u32> {
    (0..ranks * chunks).map(|stage| stage % ranks).collect()
}

/// Down the ranks and up again: two chunks make a V, more a zigzag.
#[must_use]
pub fn snake_placement(ranks: u32, chunks: u32) -> Vec<u32> {
    (0..ranks * chunks)
        .map(|stage| if (stage / ranks).is_multiple_of(2) { stage % ranks } else { ranks - 1 - stage % ranks })
        .collect()
}

/// A length that is known to be small: the number of actions is limited long before.
fn to_u32(length: usize) -> u32 {
    u32::try_from(length).expect("fewer than 2^32 ranks and stages")
}
