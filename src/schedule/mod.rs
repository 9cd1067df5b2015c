//! Schedules: for each rank an ordered list of actions, without a clock. `simulate` gives them one.

use std::ops::Range;

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

/// Who does what in which order.
///
/// Stages form one or more *chains* of equal length, each a copy of the whole model: stages
/// `c * chain_length .. (c + 1) * chain_length` are chain `c`, and data flows from each stage to the next inside its
/// chain. Bidirectional schedules have two chains, all others one.
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
}
