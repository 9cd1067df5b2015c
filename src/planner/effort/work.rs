//! Work of single operations. The unit is about 1 ns of one core.
//!
//! Each constant estimates the time of one operation. Not tuned. Another value moves the point at which a search stops,
//! and changes nothing else.

/// Work of simulating one action of a schedule.
pub(crate) const ACTION: u64 = 30;

// Passes. Extending paths takes longest, so a pass first makes the tests that need no paths.

/// Work of making the candidate stage of a label, from its begin to its end.
pub(crate) const MAKE_STAGE: u64 = 5;
/// Work of computing the memory of a stage.
pub(crate) const FIT_STAGE: u64 = 50;
/// Work of putting a stage in front of a label, before its paths are known.
pub(crate) const TRY_STAGE: u64 = 10;
/// Work of extending the paths of a label by a stage with one number of micro-batches in flight.
pub(crate) const EXTEND_PATHS: u64 = 250;
/// Work of comparing a label with one other label.
pub(crate) const COMPARE_LABELS: u64 = 10;

// Prefix tables. There is a lookup for each pair of a stage and a device level, so lookups are most of the work.

/// Work of looking up one entry of the prefix tables.
pub(crate) const LOOK_UP: u64 = 4;
/// Work of finding a stage between two cuts, for the prefix tables.
pub(crate) const FIND_STAGE: u64 = 40;
/// Work of evaluating this stage for one bucket of replicas.
pub(crate) const EVALUATE_STAGE: u64 = 20;
/// Work of computing the gradient all-reduce of this stage at one rate.
pub(crate) const SUM_GRADIENTS: u64 = 10;
/// Work of changing a plan and scoring it by annealing.
pub(crate) const ANNEAL_PLAN: u64 = 300;
/// Additional work of scoring it for each stage.
pub(crate) const ANNEAL_STAGE: u64 = 35;
/// Additional work of scoring it for each node.
pub(crate) const ANNEAL_NODE: u64 = 25;
/// Additional work of scoring it for each pair of a stage and a node.
pub(crate) const ANNEAL_STAGE_AND_NODE: u64 = 1;
/// Work of preparing the simulation of a plan, for each node of each stage.
pub(crate) const PREPARE_NODE: u64 = 400;
