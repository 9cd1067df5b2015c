//! The unit of work: about one nanosecond of one core.
//!
//! Each constant estimates the time of one operation. Not tuned. Another value moves the point where a search stops, and changes
//! nothing else.

/// Simulating one action.
pub(crate) const ACTION: u64 = 30;
/// Making the candidate stage of a label, from its begin to its end.
pub(crate) const MAKE_STAGE: u64 = 5;
/// Finding the memory of a stage.
pub(crate) const FIT_STAGE: u64 = 50;
/// Putting a stage in front of a label, before its paths are known.
pub(crate) const TRY_STAGE: u64 = 10;
/// Extending the paths of a label by a stage with one number of micro-batches in flight.
pub(crate) const EXTEND_PATHS: u64 = 250;
/// Comparing a label with one rival.
pub(crate) const COMPARE_LABELS: u64 = 10;
/// Looking up one entry of the prefix tables.
pub(crate) const LOOK_UP: u64 = 4;
/// Finding a stage between two cuts, for the prefix tables.
pub(crate) const FIND_STAGE: u64 = 40;
/// Evaluating this stage for one bucket of replicas.
pub(crate) const EVALUATE_STAGE: u64 = 20;
/// Summing the gradients of this stage at one rate.
pub(crate) const SUM_GRADIENTS: u64 = 10;
/// Changing a plan and scoring it by annealing.
pub(crate) const ANNEAL_PLAN: u64 = 300;
/// Additional work of this for each stage.
pub(crate) const ANNEAL_STAGE: u64 = 35;
/// Additional work of this for each node.
pub(crate) const ANNEAL_NODE: u64 = 25;
/// Additional work of this for each stage and node.
pub(crate) const ANNEAL_STAGE_AND_NODE: u64 = 1;
/// Preparing the simulation of a plan, for each node of each stage.
pub(crate) const PREPARE_NODE: u64 = 400;
