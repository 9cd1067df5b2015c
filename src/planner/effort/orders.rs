//! Schedules other than 1F1B, eager 1F1B and GPipe.

/// Actions of one simulated candidate. A larger one would take more than 50 ms. Not tuned.
pub(crate) const MAX_ACTIONS: u64 = 50_000;
/// Micro-batch sizes that are tried: those nearest to the best one of eager 1F1B. Not tuned.
pub(crate) const MAX_SIZES: usize = 6;
/// Share of the remaining time that one certified search may take. Not tuned.
pub(crate) const CERTIFIED_SHARE: f64 = 0.5;
/// Cuts that are run at once. They share the step that they must beat, so that the answer does not depend on the number of
/// threads. Not tuned.
pub(crate) const CUTS_AT_ONCE: usize = 8;
/// Added to the step for each capacity of memory that a device lacks, as a multiple of the step. Not tuned.
pub(crate) const SHORTFALL_PENALTY: f64 = 3.0;

/// Shapes that are improved: the most promising ones. Not tuned.
pub(crate) const IMPROVED_SHAPES: usize = 12;
/// Actions of the attempts in each round of improvement, over all shapes. Not tuned.
pub(crate) const ROUND_ACTIONS: u64 = 3_000_000;
/// Rounds of improvement. Each keeps the better half of the shapes. Not tuned.
pub(crate) const ROUNDS: usize = 4;
/// Schedules whose step after the first round is longer than the best one by this factor are not improved any more.
/// Measured: in 97 searches of eleven problems, later rounds shortened no step that fits by more than 6.3 %.
pub(crate) const BEHIND: f64 = 1.08;
/// Overhead of an attempt, as a number of actions that take as long. Not tuned.
pub(crate) const ATTEMPT_OVERHEAD: u64 = 300;
/// How far a border moves at once. Not tuned.
pub(crate) const STRIDES: [isize; 8] = [1, -1, 2, -2, 5, -5, 12, -12];
/// Work of fitting the orders to the times, in attempts. Not tuned.
pub(crate) const FITTING_ATTEMPTS: u64 = 10;
/// Actions up to which orders are fitted for each attempt. Not tuned.
pub(crate) const FITTED_ACTIONS: usize = 400;
/// Combinations of cuts up to which all of them are tried. Not tuned.
pub(crate) const ALL_CUTS: f64 = 1000.0;
/// Attempts that are remembered at once. Not tuned.
pub(crate) const REMEMBERED_ATTEMPTS: usize = 50_000;
/// Kicks without success after which improvement ends. Not tuned.
pub(crate) const MAX_KICKS: u32 = 40;
/// Devices of all groups up to which single devices move between groups. Each such move costs all stages anew. Not tuned.
pub(crate) const MAX_MOVING_DEVICES: u32 = 1024;
