//! Limits on the passes of the label search, and on local search between them.

// Rounding paths to a grid makes labels equal that hardly differ, so that one of them dominates the other.

/// Number of devices up to which paths are compared exactly. Above it they are rounded to a grid. Not tuned.
pub(crate) const EXACT_DEVICES: u32 = 16;
/// Number of grid steps in the shortest conceivable step. A pipeline of 30 stages loses at most 30 / 8192 = 0.4 % of
/// the bound. Derived from this.
pub(crate) const GRID: f64 = 8192.0;
/// Number of grid steps in the last pass, whose bound loses a quarter of this. Not tuned.
pub(crate) const FINE_GRID: f64 = 4.0 * GRID;

// Thresholds and widths of passes. A pass costs little while its threshold drops nearly every label, so the search
// starts low and first looks for plans, which make all later thresholds tight.

/// Thresholds of the first passes, as multiples of the shortest conceivable step. They end at the first threshold below
/// which there is a plan. Not tuned.
pub(crate) const REACH: [f64; 8] = [1.01, 1.03, 1.07, 1.15, 1.3, 1.6, 2.5, f64::INFINITY];
/// Ratio of step to bound up to which a plan counts as good. Then only passes that raise the bound go on. Not tuned.
pub(crate) const NEAR: f64 = 1.01;
/// Ratio of step to bound above which a first plan is annealed briefly before the first pass. Not tuned.
pub(crate) const NEEDS_ANNEALING: f64 = 1.03;
/// Ratio of step to bound above which a plan is annealed for long after the last pass. Not tuned.
pub(crate) const FAR: f64 = 1.02;
/// Number of labels that each cut keeps while there is no good plan: in the first passes, and in the pass before the
/// proof. Not tuned.
pub(crate) const BEAMS: [usize; 2] = [50, 2_000];
/// Number of labels that each cut keeps in the search for a plan that is only a comparison. Not tuned.
pub(crate) const SHORT_BEAM: usize = 10;
/// Rise of the threshold of the next pass, as a share of the distance from the last threshold to the best step. Not
/// tuned.
pub(crate) const RISE: f64 = 0.3;
/// Smallest rise of the threshold, as a share of the step. Not tuned.
pub(crate) const MIN_RISE: f64 = 0.02;
/// Multiple of its fair share of the remaining work that one micro-batch size may take. Not tuned.
pub(crate) const UNEVEN: u64 = 2;
/// Number of labels that each pass may make, even if less is left. Not tuned.
pub(crate) const MIN_LABELS: usize = 5_000;
/// Work that each pass may do, even if less is left: 20 ms. Not tuned.
pub(crate) const MIN_WORK: u64 = 20_000_000;
/// Number of plans of each micro-batch size that are simulated after a pass. Not tuned.
pub(crate) const SIMULATED: usize = 64;
/// Number of packed plans that are simulated at the start, if no pattern gave a plan. Not tuned.
pub(crate) const FIRST_SIMULATED: usize = 8;
/// Number of complete plans that a pass keeps. Not tuned: [`SIMULATED`] of them are simulated.
pub(crate) const PLANS_OF_PASS: usize = 400;
/// Number of relaxed plans that are kept for placement. Not tuned.
pub(crate) const RELAXED_PLANS: usize = 8;

// Relaxed passes only prove that no plan is below a threshold. There are many of them, so each has a low limit.

/// Limit on the labels of all relaxed passes. Not tuned.
pub(crate) const RELAXED_LABELS: u64 = 3_000_000;
/// Limit on the labels of one relaxed pass over one micro-batch size. Not tuned.
pub(crate) const RELAXED_LABELS_OF_PASS: usize = 150_000;
/// Limit on the work of one relaxed pass over one micro-batch size: 0.6 s. Not tuned.
pub(crate) const RELAXED_WORK_OF_PASS: u64 = 2_400_000_000;

// Local search runs after every pass with a new best plan, so it must end soon on large plans, too.

/// Number of choices of in-flight micro-batches up to which local search tries all of them. A plan of five stages has
/// fewer. Not tuned.
pub(crate) const ALL_WINDOWS: usize = 200;
/// Number of choices with short paths that are kept for each number in flight of each stage, if there are too many to
/// try all. Not tuned.
pub(crate) const PROMISING_WINDOWS: usize = 16;
/// Limit on the nodes of stages, summed over all plans that one local search evaluates. Not tuned.
pub(crate) const LOCAL_SEARCH_NODES: usize = 3_000_000;

// Placements. The number of situations grows fast with the number of nodes, so large clusters are searched in a
// restricted or a relaxed space.

/// Number of situations of free devices up to which every placement is searched. Above it, only node-aligned placements
/// are. Not tuned.
pub(crate) const EXACT_SITUATIONS: f64 = 4_000.0;
/// Number of devices up to which a node-aligned placement may leave two nodes partly used, and end a stage inside a
/// node. Not tuned.
pub(crate) const FINE_DEVICES: u32 = 32;
/// Divisor of the smallest replica count of a range: the refined relaxed space splits ranges so that none ends more
/// than a tenth above its smallest count. Not tuned.
pub(crate) const FINE_RANGE: u32 = 10;
/// Predicted ratio of the slowest passes in front to the slowest passes of a kept middle stage. Any middle gives a
/// bound, so a wrong prediction only weakens it. Not tuned.
pub(crate) const SLOWER_IN_FRONT: f64 = 1.15;

// Searches for memory repeat a whole packing or search, so they end with a coarse answer.

/// Number of stages with a choice of recomputation up to which an evaluation tries all combinations. Not tuned.
pub(crate) const OPEN_STAGES: usize = 6;
/// Ratio of memory shortfalls below which a plan of another micro-batch size replaces the closest plan. Not tuned.
pub(crate) const SMALLER_SHORTFALL: f64 = 0.97;
/// Number of searches for the plan with the least memory. Each halves the range that is open. Not tuned.
pub(crate) const MEMORY_ROUNDS: u32 = 8;
/// Width of this range at the end, as a share of the sufficient memory. Not tuned.
pub(crate) const MEMORY_TOLERANCE: f64 = 0.02;
