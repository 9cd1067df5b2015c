//! Bounds over all placements, and conditions on memory.

/// Relaxed passes of one micro-batch size that may take too much before its bound stays as it is. Not tuned.
pub(crate) const MAX_FAILED_PASSES: u32 = 6;
/// A pass that took too much is tried again with this multiple of its allowance. Not tuned.
pub(crate) const RETRY_FACTOR: f64 = 1.5;
/// No threshold is tried that is nearer than this, as a share of the bound, to one that took too much. Not tuned.
pub(crate) const MIN_DISTANCE: f64 = 5e-3;
/// No threshold is tried if one that would take too much is predicted to be nearer than this. Not tuned.
pub(crate) const MIN_PREDICTED_RISE: f64 = 2e-3;
/// Share of its allowance that the next pass should take, as predicted from the last two. Not tuned.
pub(crate) const PREDICTED_SHARE: f64 = 0.8;
/// Work of labels below the allowance over this counts as this much, since it says nothing about growth. Not tuned.
pub(crate) const MIN_SHARE: u64 = 5_000;
/// Work of a pass over the refined space, as a multiple. Not tuned.
pub(crate) const REFINED_FACTOR: u64 = 4;
/// First rise of the threshold over the refined space, as a share of the bound. Not tuned.
pub(crate) const REFINED_RISE: f64 = 0.005;
/// How far towards a threshold that took too much the next one is. Not tuned.
pub(crate) const NEXT_SHARE: f64 = 0.4;
/// Tables go on until they know within this share of the threshold where they begin to leave plans. Not tuned.
pub(crate) const TABLE_TOLERANCE: f64 = 0.01;
/// Tables that take less than the allowance over this are fast: the next one goes up to the best step at once. Not tuned.
pub(crate) const FAST_TABLES: u64 = 20;
/// First rise of the threshold, as a share of the bound. Not tuned.
pub(crate) const FIRST_RISE: f64 = 0.02;
/// The rise doubles after a pass that took less than this share of its allowance. Not tuned.
pub(crate) const LITTLE_WORK: f64 = 0.02;
/// Micro-batch sizes whose bounds rise at once: those with the lowest bounds. Not tuned.
pub(crate) const SIZES_AT_ONCE: usize = 2;

/// Replica counts of stages that the memory conditions check for all micro-batch sizes together: about 10 ns each. Beyond,
/// stages further in front count as the last ones checked, which hold less. Not tuned.
pub(crate) const MAX_CHECKED: usize = 10_000_000;
/// Replica counts that are checked in the second round, for sizes that the first one leaves open. Not tuned.
pub(crate) const MAX_CHECKED_AGAIN: usize = 30_000_000;
/// Replica counts that are checked where the answer only saves time. Not tuned.
pub(crate) const MAX_CHECKED_BRIEFLY: usize = 1_000_000;
/// Choices of device costs that the memory conditions check where devices differ in memory. Not tuned.
pub(crate) const MAX_DEVICE_COSTS: usize = 12;
/// Values of ε for the functions of docs/proofs.md, *Memory*. Not tuned.
pub(crate) const EPSILONS: [f64; 5] = [0.0, 0.1, 0.2, 1.0 / 3.0, 0.5];
/// Capacities, the largest first, without whose devices layers are summed. Not tuned.
pub(crate) const MAX_CAPACITIES_LEFT_OUT: usize = 3;
/// Slices of all cuts. Twice as many halve what a stage loses at its ends, and take four times as long. Not tuned.
pub(crate) const SLICES: usize = 400;
