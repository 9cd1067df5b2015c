//! Limits on the search for plans with schedules other than 1F1B, eager 1F1B and GPipe.

// Larger problems have no lower bound under these schedules, so candidates are compared by simulation. The limits keep
// the number and the size of simulations small.

/// Limit on the actions of one simulated candidate. A larger one would take more than 50 ms. Not tuned.
pub(crate) const MAX_ACTIONS: u64 = 50_000;
/// Limit on the actions of all plans of a problem up to which each of them runs. Not tuned.
pub(crate) const EVERY_PLAN_ACTIONS: u64 = 3_000_000;
/// Limit on the stages that are placed to list all plans. Not tuned.
pub(crate) const EVERY_PLAN_STAGES: usize = 30_000;
/// Number of cuts of a problem up to which its plans are listed. Not tuned.
pub(crate) const EVERY_PLAN_CUTS: usize = 16;
/// Number of devices of a problem up to which its plans are listed. Not tuned.
pub(crate) const EVERY_PLAN_DEVICES: u32 = 10;
/// Number of micro-batch sizes that are tried: the sizes nearest to the best one of eager 1F1B. Not tuned.
pub(crate) const MAX_SIZES: usize = 6;
/// Share of the remaining time that one certified search may take. Not tuned.
pub(crate) const CERTIFIED_SHARE: f64 = 0.5;
/// Number of cuts that run at once. All of them compare with the step that was best before, so the answer does not
/// depend on the number of threads. Not tuned.
pub(crate) const CUTS_AT_ONCE: usize = 8;
/// Penalty for missing memory: added to the step for each device capacity that a device lacks, as a multiple of the
/// step. Not tuned.
pub(crate) const SHORTFALL_PENALTY: f64 = 3.0;

/// Number of nodes up to which groups take the devices in every order of the nodes. Not tuned.
pub(crate) const PERMUTED_NODES: usize = 3;
/// Number of devices up to which every division of the devices among groups is a start. Not tuned.
pub(crate) const LISTED_DEVICES: u32 = 5;

// Improvement drops the slower half of the shapes after each round, so that most of the work goes to the best ones.

/// Number of shapes that are improved: the most promising ones. Not tuned.
pub(crate) const IMPROVED_SHAPES: usize = 12;
/// Limit on the actions of all attempts in one round of improvement, over all shapes. Not tuned.
pub(crate) const ROUND_ACTIONS: u64 = 3_000_000;
/// Number of rounds of improvement. Each keeps the better half of the shapes. Not tuned.
pub(crate) const ROUNDS: usize = 4;
/// Ratio to the best step above which a schedule is not improved any more after the first round. Measured: in 97
/// searches of eleven problems, later rounds shortened no step that fits by more than 6.3 %.
pub(crate) const BEHIND: f64 = 1.08;
/// Overhead of an attempt, in actions of equal time. Not tuned.
pub(crate) const ATTEMPT_OVERHEAD: u64 = 300;
/// Numbers of layers by which a border between stages moves at once. Not tuned.
pub(crate) const STRIDES: [isize; 8] = [1, -1, 2, -2, 5, -5, 12, -12];
/// Work of fitting a schedule to the times of its actions, in attempts. Not tuned.
pub(crate) const FITTING_ATTEMPTS: u64 = 10;
/// Number of actions up to which every attempt fits its schedule to the times. Not tuned.
pub(crate) const FITTED_ACTIONS: usize = 400;
/// Number of combinations of cuts up to which all of them are tried. Not tuned.
pub(crate) const ALL_CUTS: f64 = 1000.0;
/// Number of attempts that are remembered at once, so that none is repeated. Not tuned.
pub(crate) const REMEMBERED_ATTEMPTS: usize = 50_000;
/// Number of random changes without success after which improvement ends. Not tuned.
pub(crate) const MAX_KICKS: u32 = 40;
/// Number of devices of all groups up to which single devices move between groups. Each such move requires the costs of
/// all stages again. Not tuned.
pub(crate) const MAX_MOVING_DEVICES: u32 = 1024;

// Local search for schedules with one stage per device.

/// Number of promising plans of the bound that are run: the ones with the lowest bounds. Not tuned.
pub(crate) const PROMISING_ROWS: usize = 4;
/// Limit on the actions of one local search: about 1 ms. Not tuned.
pub(crate) const LOCAL_SEARCH_ACTIONS: u64 = 80_000;
/// Work of evaluating the stages of a plan, in actions of equal time. Not tuned.
pub(crate) const EVALUATION_ACTIONS: u64 = 300;
/// Numbers of layers that follow a device to its new stage. Not tuned.
pub(crate) const FOLLOWING: [isize; 3] = [1, 2, 5];
/// Number of stages up to which any two swap their devices, where nodes differ. Deeper pipelines swap those of neighbors
/// only. Not tuned.
pub(crate) const SWAPPED_STAGES: usize = 6;
/// Number of nodes of a stage from which single devices move to a neighbor. Not tuned.
pub(crate) const MOVED_FROM: usize = 4;
