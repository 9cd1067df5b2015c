//! Limits on the work of bounds over all placements, and of the conditions on memory.

// Thresholds of relaxed passes. The work of a pass grows steeply with its threshold, and a pass that exceeds its limit
// proves little. So thresholds rise in steps, and stay away from those that were too much.

/// Number of relaxed passes over one micro-batch size that may exceed their work limit. Then its bound stays as it is.
/// Not tuned.
pub(crate) const MAX_FAILED_PASSES: u32 = 6;
/// Factor by which the work limit must exceed an insufficient one for another try. Not tuned.
pub(crate) const RETRY_FACTOR: f64 = 1.5;
/// Smallest distance from the bound to a threshold that was too much, as a share of the bound. A nearer one ends the
/// passes of a size. Not tuned.
pub(crate) const MIN_DISTANCE: f64 = 5e-3;
/// Smallest rise of the threshold that must be predicted as affordable for another pass, as a share of the bound. Not
/// tuned.
pub(crate) const MIN_PREDICTED_RISE: f64 = 2e-3;
/// Share of its allowance that the next pass should take, as predicted from the last two. Not tuned.
pub(crate) const PREDICTED_SHARE: f64 = 0.8;
/// Divisor of the work limit. Labels of a pass that take less than this fraction count as this fraction, since less
/// work says nothing about growth. Not tuned.
pub(crate) const MIN_SHARE: u64 = 5_000;
/// Predicted work of a pass over the refined space, as a multiple of a pass before. Not tuned.
pub(crate) const REFINED_FACTOR: u64 = 4;
/// First rise of the threshold over the refined space, as a share of the bound. Not tuned.
pub(crate) const REFINED_RISE: f64 = 0.005;
/// Position of the next threshold between the bound (0) and a threshold that was too much (1). Not tuned.
pub(crate) const NEXT_SHARE: f64 = 0.4;
/// Width at which the bisection by tables ends, as a share of the threshold. Not tuned.
pub(crate) const TABLE_TOLERANCE: f64 = 0.01;
/// Divisor of the work limit below which tables are fast. The next ones then go up to the best step at once. Not tuned.
pub(crate) const FAST_TABLES: u64 = 20;
/// First rise of the threshold above the bound, as a share of the bound. Not tuned.
pub(crate) const FIRST_RISE: f64 = 0.02;
/// Share of its work limit below which a pass took little. The rise doubles after such a pass. Not tuned.
pub(crate) const LITTLE_WORK: f64 = 0.02;
/// Number of micro-batch sizes whose bounds rise at once: the sizes with the lowest bounds. Not tuned.
pub(crate) const SIZES_AT_ONCE: usize = 2;

// Conditions on memory. They run before every search, so they must take little time where a plan obviously fits.

/// Limit on the replica counts of stages that the memory conditions check for all micro-batch sizes together: about 10
/// ns each. Beyond it, stages further in front count as the last ones checked, which hold less. Not tuned.
pub(crate) const MAX_CHECKED: usize = 10_000_000;
/// Limit on the replica counts that the second round checks, for sizes that the first round leaves open. Not tuned.
pub(crate) const MAX_CHECKED_AGAIN: usize = 30_000_000;
/// Limit on the replica counts where the answer only saves time. Not tuned.
pub(crate) const MAX_CHECKED_BRIEFLY: usize = 1_000_000;
/// Choices of device costs that the memory conditions check where devices differ in memory. Not tuned.
pub(crate) const MAX_DEVICE_COSTS: usize = 12;
/// Values of ε for the functions of docs/proofs.md, *Memory*. Not tuned.
pub(crate) const EPSILONS: [f64; 5] = [0.0, 0.1, 0.2, 1.0 / 3.0, 0.5];
/// Number of capacities, next to the largest one, up to which a condition on layers leaves out sizes and devices. Not
/// tuned.
pub(crate) const MAX_CAPACITIES_LEFT_OUT: usize = 3;
/// Number of slices of all cuts. 800 would halve what a stage loses at its ends, and take four times as long. Not
/// tuned.
pub(crate) const SLICES: usize = 400;

// The bound for any order of actions (`any_order`).

/// Number of units of devices that the bound distinguishes. Larger clusters count several devices as one unit. Not
/// tuned.
pub(crate) const ANY_ORDER_UNITS: u32 = 64;
/// Limit on the stages of one micro-batch size, times the units of devices. Beyond it there is only the bound of all
/// cuts. Not tuned.
pub(crate) const ANY_ORDER_STEPS: usize = 20_000_000;
/// Number of stages of a branching model up to which each has its own gradient reduction. Beyond it, a bound from sums
/// stands for it. Not tuned.
pub(crate) const ANY_ORDER_REDUCTIONS: usize = 1_000;
/// Width at which the bisection of thresholds ends, as a share of the threshold. Not tuned.
pub(crate) const ANY_ORDER_TOLERANCE: f64 = 2e-3;
