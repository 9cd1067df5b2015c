//! Limits on the plans that patterns and packing give.

// Patterns give the first good plans, so they try few values of each parameter. Annealing and passes
// refine the best of them.

/// Numbers of stages of patterns. Not tuned.
pub(crate) const STAGE_COUNTS: [usize; 25] =
    [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 18, 20, 24, 28, 32, 40, 48, 64, 96];
/// Numbers of devices of a first or last stage that takes few. Each is on another node as long as there are some. Not
/// tuned.
pub(crate) const FEW_DEVICES: [u32; 8] = [1, 2, 3, 4, 6, 8, 12, 16];
/// Largest number of stages of a pattern with such a stage. Not tuned.
pub(crate) const MAX_STAGES_BESIDE_FEW: usize = 4;
/// Number of cuts that patterns use. A model with more cuts leaves some out. Measured: at 200 and at 800, no step or
/// bound of the 12 problems changes.
pub(crate) const MAX_PATTERN_CUTS: usize = 400;
/// Number of nodes above which there are fewer patterns: blocks of 1, 8 and all nodes, the first half and quarter of
/// the nodes, numbers of stages and of few devices that are powers of two (stages also three times these). Not tuned.
pub(crate) const MANY_NODES: usize = 64;
/// Number of pattern plans whose first or last stage is split in two. Measured: at 8 and at 32, no step or bound of the
/// 12 problems changes.
pub(crate) const SPLIT_PLANS: usize = 16;
/// Shares of its devices that the first of the two stages gets. Not tuned.
pub(crate) const SPLIT_SHARES: [(u32, u32); 5] = [(1, 4), (1, 3), (1, 2), (2, 3), (3, 4)];
/// Largest ratio of the path of a split plan to the path before the split, until its cuts move. Measured: at 1.2, no
/// step or bound of the 12 problems changes.
pub(crate) const SPLIT_TOLERANCE: f64 = 1.1;
/// Limit on the bisection steps for the longest stage, unless [`STAGE_TOLERANCE`] ends it earlier. Not tuned.
pub(crate) const MAX_BISECTIONS: u32 = 14;
/// Width at which this bisection ends: 0.2 % of the longest stage. Annealing moves cuts by single layers later. Not
/// tuned.
pub(crate) const STAGE_TOLERANCE: f64 = 2e-3;
/// Number of gradient all-reduce times that a scorer of patterns keeps. Hardly one is used twice. Not tuned.
pub(crate) const PATTERN_SYNCS: usize = 16;
/// Number of plans that are kept for each micro-batch size and number of stages. Measured: at 1 and at 6, no step or
/// bound of the 12 problems changes.
pub(crate) const PLANS_PER_STAGE_COUNT: usize = 3;

// A branching model has too many rows of nested cuts to compare all. A row steps from a cut to one of its nearest
// smaller cuts.

/// Number of nearest smaller cuts to which a row of cuts of a branching model may step. Not tuned.
pub(crate) const ROW_NEIGHBOURS: usize = 16;
/// Number of smaller cuts that are searched for these. Not tuned.
pub(crate) const ROW_CANDIDATES: usize = 256;

// Packing ignores links and takes the fewest devices, so it is fast. It serves as a first plan, and to explain a
// shortage of memory.

/// Limit on the stages of packed plans, unless more are necessary to fit. Not tuned.
pub(crate) const PACKED_STAGES: usize = 16;
/// Limit on the cuts of packed plans. Not tuned.
pub(crate) const PACKED_CUTS: usize = 160;
/// Limit on the cuts for the explanation of a shortage. Half of them would take an eighth of the time. Not tuned.
pub(crate) const COARSE_CUTS: usize = 64;
/// Limits on the longest stage of packed plans, as multiples of the mean. Not tuned.
pub(crate) const STAGE_LIMITS: [f64; 10] = [1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0, f64::INFINITY];
/// Number of these limits that are tried, of the limits that leave plans. Not tuned.
pub(crate) const STAGE_LIMITS_KEPT: usize = 3;
/// Bisection steps for the missing memory, on a logarithmic scale that starts at a millionth of it. Derived: 10^(6 /
/// 2^10) leaves 1.4 %.
pub(crate) const SHORTFALL_BISECTIONS: u32 = 10;
/// Number of checks after which the search for the plan that lacks least memory ends, if provably none fits: about 30 ms.
/// Not tuned.
pub(crate) const SHORTFALL_CHECKS: u64 = 20_000;
