//! Limits on the size of the prefix tables and of their inputs.

/// Resolution of the prefix tables.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Resolution {
    /// Limit on the lookups of one table: pairs of a stage and a number of devices in front of it. The builder coarsens
    /// the tables until the limit holds, or until no coarser setting is left.
    pub max_work: f64,
    /// Limit on the groups of cuts. The cuts of a group share one entry.
    pub max_cut_groups: usize,
}

// Limits on table size. They trade the quality of the bound against time and memory. No value makes the bound wrong.

/// Resolution for passes, which by themselves distinguish much of what coarse tables merge. Not tuned.
pub(crate) const PASS_RESOLUTION: Resolution = Resolution { max_work: 8e6, max_cut_groups: usize::MAX };
/// Resolution for bounds from tables alone. No pass follows, so they are about four times as fine. Not tuned.
pub(crate) const BISECTION_RESOLUTION: Resolution = Resolution { max_work: 3e7, max_cut_groups: usize::MAX };
/// Limit on the lookups of all tables together, as a multiple of [`Resolution::max_work`]. Each number of stages behind
/// a cut has a table, and the last table also serves larger numbers. Not tuned.
pub(crate) const TOTAL_WORK_FACTOR: f64 = 5.0;
/// Largest number of levels of device counts. More devices are rounded up to one of these levels, which only lowers the
/// bound. 384 levels would double the entries. Not tuned.
pub(crate) const MAX_DEVICE_LEVELS: u32 = 192;
/// Smallest number of levels. The builder halves the levels until the work limit holds, but not below this. Not tuned.
pub(crate) const MIN_DEVICE_LEVELS: u32 = 32;
/// Limit on the entries of all tables. An entry is eight `f64`, so this is 192 MB. Derived from this.
pub(crate) const MAX_ENTRIES: usize = 3_000_000;
/// Number of lookups above which several threads build a table: about 4 ms. Not tuned.
pub(crate) const PARALLEL_WORK: f64 = 1e6;
/// Largest ratio of replica counts in one bucket; 1.0 keeps all of them apart. The builder takes the first combination
/// with [`CUT_GROUP_COUNTS`] that meets the work limit, in the order of what it loses. Not tuned.
pub(crate) const REPLICA_RATIOS: [f64; 8] = [1.0, 1.07, 1.15, 1.3, 1.6, 2.5, 6.0, 40.0];
/// Numbers of cut groups to try if one group per cut is too much work. Not tuned.
pub(crate) const CUT_GROUP_COUNTS: [usize; 3] = [192, 96, 48];
/// Number of stages that a plan is assumed to have in the estimate of what grouping loses: each stage loses one group
/// of cuts. Not tuned.
pub(crate) const ASSUMED_STAGES: u32 = 16;
/// Number of stages that are sampled to estimate the work of a table. Not tuned.
pub(crate) const WORK_SAMPLE: usize = 30_000;

// Inputs of the tables. Slices stay empty where one layer is larger than a slice, so they must become narrower until
// there are enough groups.

/// Factor by which the number of slices grows until there are enough groups of cuts, and the largest number of times.
/// Not tuned.
pub(crate) const SLICE_GROWTH: (f64, u32) = (1.2, 20);
/// Limit on the stages of a branching model that are kept once found, 12 bytes each. Derived: 48 MB.
pub(crate) const MAX_KEPT_STAGES: usize = 4_000_000;

// Devices of several speeds. A situation of the relaxed space stores a count of each class, and tables grow with the
// number of units, so both stay small.

/// Largest number of device classes that are distinguished. With more, all devices count as the fastest with the most
/// memory. Not tuned.
pub(crate) const MAX_DEVICE_CLASSES: usize = 6;
/// Largest number of units of the fastest device. Not tuned.
pub(crate) const MAX_UNITS: u32 = 12;
/// Share of the speed of all devices that rounding to units may lose. Not tuned.
pub(crate) const UNIT_LOSS: f64 = 1e-2;

// Ranges of link bounds. Pairs of ranges are compared, so the time grows with the square of their number.

/// Number of ranges of node counts that link bounds distinguish. Not tuned.
pub(crate) const NODE_RANGES: u32 = 4;
/// Share of an all-reduce time below which a difference does not matter: node counts that differ by less form one
/// range. Not tuned.
pub(crate) const SAME_ALL_REDUCE: f64 = 0.01;
/// Largest number of ranges of replicas that link bounds compare in pairs. Not tuned.
pub(crate) const MAX_REPLICA_RANGES: usize = 64;
/// Largest number of ranges of replicas that the relaxed space has at first. With 16 or 48 in place of 24, the gap of
/// VGG-19 with 16,384 samples on 128 nodes of 8 devices is 2.6 or 16 % in place of 2.1 %.
pub(crate) const MAX_JOINED_RANGES: usize = 24;
/// Largest ratios of replica counts in one such range, in the order in which they are tried. The first one with few
/// enough ranges counts. Not tuned.
pub(crate) const RANGE_RATIOS: [f64; 8] = [1.0, 1.03, 1.07, 1.1, 1.15, 1.2, 1.3, 1.6];
