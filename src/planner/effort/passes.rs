//! Passes of the label search, and what is done between them.

/// Devices up to which paths are compared exactly. Beyond, they are rounded to a grid. Not tuned.
pub(crate) const EXACT_DEVICES: u32 = 16;
/// Points of the grid in the shortest conceivable step. A pipeline of 30 stages loses 30 / 8192 = 0.4 % of the bound.
/// Derived from this.
pub(crate) const GRID: f64 = 8192.0;
/// Points of the grid in the last pass, whose bound loses a quarter of this. Not tuned.
pub(crate) const FINE_GRID: f64 = 4.0 * GRID;

/// Thresholds of the first passes, as multiples of the shortest conceivable step. Passes end at the first threshold below
/// which there is a plan. A pass with a low threshold takes little, since nearly every label is dropped. Not tuned.
pub(crate) const REACH: [f64; 8] = [1.01, 1.03, 1.07, 1.15, 1.3, 1.6, 2.5, f64::INFINITY];
/// A plan within this factor of the bound is good: only passes that raise the bound go on. Not tuned.
pub(crate) const NEAR: f64 = 1.01;
/// A first plan above this multiple of the bound is annealed briefly before the first pass. Not tuned.
pub(crate) const NEEDS_ANNEALING: f64 = 1.03;
/// A plan above this multiple of the bound after the last pass is annealed for long. Not tuned.
pub(crate) const FAR: f64 = 1.02;
/// Labels of each cut that go on while there is no good plan: in the first passes, and in the one before the proof.
/// Not tuned.
pub(crate) const BEAMS: [usize; 2] = [50, 2_000];
/// Labels of each cut that go on in the search for a plan that is only compared with. Not tuned.
pub(crate) const SHORT_BEAM: usize = 10;
/// The threshold of the next pass, as a share of the way from that of the last one to the best step. Not tuned.
pub(crate) const RISE: f64 = 0.3;
/// The next threshold is higher by at least this share of the step. Not tuned.
pub(crate) const MIN_RISE: f64 = 0.02;
/// One micro-batch size may take this multiple of its fair share of the remaining work. Not tuned.
pub(crate) const UNEVEN: u64 = 2;
/// Labels that each pass may make, however little is left. Not tuned.
pub(crate) const MIN_LABELS: usize = 5_000;
/// Work that each pass may do, however little is left: 20 ms. Not tuned.
pub(crate) const MIN_WORK: u64 = 20_000_000;
/// Plans of each micro-batch size that are simulated after a pass. Not tuned.
pub(crate) const SIMULATED: usize = 64;
/// Packed plans that are simulated at the start, if no pattern gave a plan. Not tuned.
pub(crate) const FIRST_SIMULATED: usize = 8;
/// Complete plans that a pass keeps. Not tuned: [`SIMULATED`] of them are simulated.
pub(crate) const PLANS_OF_PASS: usize = 400;
/// Relaxed plans that are kept to be placed. Not tuned.
pub(crate) const RELAXED_PLANS: usize = 8;

/// Labels of all relaxed passes. Not tuned.
pub(crate) const RELAXED_LABELS: u64 = 3_000_000;
/// Labels of one relaxed pass over one micro-batch size. Not tuned.
pub(crate) const RELAXED_LABELS_OF_PASS: usize = 150_000;
/// Work of one relaxed pass over one micro-batch size: 0.6 s. Not tuned.
pub(crate) const RELAXED_WORK_OF_PASS: u64 = 600_000_000;

/// Choices of in-flight micro-batches that local search tries completely. A plan of five stages has fewer. Not tuned.
pub(crate) const ALL_WINDOWS: usize = 200;
/// Where there are more, choices with short paths that are kept for each number of each stage. Not tuned.
pub(crate) const PROMISING_WINDOWS: usize = 16;
/// Nodes of stages, summed over all plans that one local search looks at. Not tuned.
pub(crate) const LOCAL_SEARCH_NODES: usize = 3_000_000;

/// Situations of free devices up to which every placement is searched. Beyond, only node-aligned placements are.
/// Not tuned.
pub(crate) const EXACT_SITUATIONS: f64 = 4_000.0;
/// Devices up to which a node-aligned placement may leave two nodes partly used, and end a stage inside a node.
/// Not tuned.
pub(crate) const FINE_DEVICES: u32 = 32;
/// The relaxed space splits ranges of replicas so that none ends more than 1 / this above its smallest. Not tuned.
pub(crate) const FINE_RANGE: u32 = 10;
/// How much slower than the kept middle stage the stages in front of it are guessed to be. Either middle gives a bound.
/// Not tuned.
pub(crate) const SLOWER_IN_FRONT: f64 = 1.15;

/// Memory by which a plan must be smaller to replace the closest plan, as a factor. Not tuned.
pub(crate) const SMALLER_SHORTFALL: f64 = 0.97;
/// Searches for the plan with the least memory. Each halves the range that is open. Not tuned.
pub(crate) const MEMORY_ROUNDS: u32 = 8;
/// Width of this range at the end, as a share of the memory that suffices. Not tuned.
pub(crate) const MEMORY_TOLERANCE: f64 = 0.02;
