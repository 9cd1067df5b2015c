//! Size of the prefix tables, and of what they are made from.

/// Resolution of the prefix tables.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Resolution {
    /// Lookups of one table: pairs of a stage and a number of devices in front of it. The builder coarsens the tables until
    /// this holds, or until no coarser setting is left.
    pub max_work: f64,
    /// Groups of cuts. A model with more cuts is grouped, and a group shares one entry.
    pub max_cut_groups: usize,
}

/// Resolution for passes, which tell apart by themselves much of what coarse tables merge. Not tuned.
pub(crate) const PASS_RESOLUTION: Resolution = Resolution { max_work: 8e6, max_cut_groups: usize::MAX };
/// Resolution for bounds from tables alone. No pass follows, so they are about four times as fine. Not tuned.
pub(crate) const BISECTION_RESOLUTION: Resolution = Resolution { max_work: 3e7, max_cut_groups: usize::MAX };
/// Lookups of all tables together, as a multiple of [`Resolution::max_work`]. Each number of stages behind a cut has a table,
/// and the last table also serves larger numbers. Not tuned.
pub(crate) const TOTAL_WORK_FACTOR: f64 = 5.0;
/// Levels of device counts. More devices are rounded up to one of these levels, which only lowers the bound. Not tuned.
pub(crate) const MAX_DEVICE_LEVELS: u32 = 192;
/// The builder halves the levels until the work limit holds, but not below this. Not tuned.
pub(crate) const MIN_DEVICE_LEVELS: u32 = 32;
/// Entries of all tables. An entry is eight `f64`, so this is 192 MB. Derived from this.
pub(crate) const MAX_ENTRIES: usize = 3_000_000;
/// Lookups from which on several threads build a table: about 4 ms. Not tuned.
pub(crate) const PARALLEL_WORK: f64 = 1e6;
/// Largest ratio of replica counts in one bucket; 1.0 keeps all of them apart. The builder takes the first combination with
/// [`CUT_GROUP_COUNTS`] that meets the work limit, in the order of what it loses. Not tuned.
pub(crate) const REPLICA_RATIOS: [f64; 8] = [1.0, 1.07, 1.15, 1.3, 1.6, 2.5, 6.0, 40.0];
/// Numbers of cut groups to try. Not tuned.
pub(crate) const CUT_GROUP_COUNTS: [usize; 3] = [192, 96, 48];
/// Stages that a plan is assumed to have, to estimate what grouping loses: each loses one group of cuts. Not tuned.
pub(crate) const ASSUMED_STAGES: u32 = 16;
/// Stages that are sampled to estimate the work of a table. Not tuned.
pub(crate) const WORK_SAMPLE: usize = 30_000;

/// Factor by which the slices that make groups of cuts grow until there are enough groups, and how often. Slices stay empty
/// where one layer is larger than a slice. Not tuned.
pub(crate) const SLICE_GROWTH: (f64, u32) = (1.2, 20);
/// Stages of a branching model that are kept once found, 12 bytes each. Derived: 48 MB.
pub(crate) const MAX_KEPT_STAGES: usize = 4_000_000;

/// Device classes that are told apart. Beyond, all devices count as the fastest with the most memory. A situation of the
/// relaxed space stores a count of each class. Not tuned.
pub(crate) const MAX_DEVICE_CLASSES: usize = 6;
/// Units that the fastest device counts. Not tuned.
pub(crate) const MAX_UNITS: u32 = 12;
/// Speed of all devices that may be lost by rounding them to units. Not tuned.
pub(crate) const UNIT_LOSS: f64 = 1e-2;

/// Ranges of node counts that link bounds tell apart. Not tuned.
pub(crate) const NODE_RANGES: u32 = 4;
/// Node counts whose all-reduce times differ by less than this share are one range. Not tuned.
pub(crate) const SAME_ALL_REDUCE: f64 = 0.01;
/// Ranges of replicas that link bounds compare in pairs. Not tuned.
pub(crate) const MAX_REPLICA_RANGES: usize = 64;
/// Largest ratio of replica counts in one such range: the first that leaves few enough. Not tuned.
pub(crate) const RANGE_RATIOS: [f64; 6] = [1.0, 1.03, 1.07, 1.15, 1.3, 1.6];
