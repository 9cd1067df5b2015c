//! Limits on the work of a search. All tuned constants of the planner are in this folder.
//!
//! A constant is in one of three states, which its comment names:
//!
//! - *Derived*: the value follows from another one, which the comment names.
//! - *Measured*: the comment names the problems, and the changes at other values. "The 12 problems" are seeds 2, 4, 17,
//!   24 and 26, `vgg-16-8x8`, `chain-167-2x8` and `resnet101-2x8` of `benches/questions.py`, and four of the built-in
//!   models on 2 × 8 devices. They have 120,000 labels and 330 simulated plans together.
//! - *Not tuned*: values were never compared. Another value may be as good or better.
//!
//! No value makes a bound wrong or an answer invalid. The values trade the length of the step and the quality of the
//! bound against time and memory.
//!
//! Searches count work instead of time, so that an answer does not depend on the machine or its load. [`work`] defines
//! the unit. There are three levels of work: [`SHORT`] for a plan that is only a comparison, [`QUICK`] for a first
//! search, and [`WHOLE`] for the answer.

pub(crate) mod action_lists;
pub(crate) mod annealing;
pub(crate) mod bounds;
pub(crate) mod chain;
pub(crate) mod passes;
pub(crate) mod placement;
pub(crate) mod tables;
pub(crate) mod work;

/// Limits on the work of a search. All parts of a search count the same unit, [`work`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct WorkBudget {
    /// Limit on the labels of all passes.
    pub labels: u64,
    /// Limit on the work of all passes.
    pub work: u64,
    /// Limit on the labels of one pass over one micro-batch size. A pass that reaches a limit drops its other labels.
    /// Its bound is then at most the smallest bound among them.
    pub labels_of_pass: usize,
    /// Limit on the work of one pass over one micro-batch size.
    pub work_of_pass: u64,
    /// Number of values of the micro-batches in flight that a pass distinguishes for each stage.
    pub in_flight_values: u32,
    /// Limit on the tables of a pass. Each table is for one number of stages behind a cut.
    pub behind: usize,
    /// Number of grid steps in the shortest conceivable step. On more than [`passes::EXACT_DEVICES`] devices, paths are
    /// rounded down to this grid.
    pub grid: f64,
    /// Whether the relaxed space refines ranges of replicas once it can prove no more.
    pub is_fine: bool,
    /// Limit on the plans that local search simulates.
    pub improved: u64,
    /// Limit on the actions that are simulated after a pass, and by local search.
    pub actions: u64,
}

// These limits decide when a search ends. They count work, not time: a deadline would make the answer depend on the
// machine.

/// Work of a whole search: about 4.5 s on two cores. Not tuned.
pub(crate) const ALL_WORK: u64 = 9_000_000_000;

/// The whole search: passes of up to 4 s. The labels take 0.25 GB. Not tuned.
pub(crate) const WHOLE: WorkBudget = WorkBudget {
    labels: 1_500_000,
    work: ALL_WORK,
    labels_of_pass: 1_500_000,
    work_of_pass: 4_000_000_000,
    in_flight_values: 8,
    behind: usize::MAX,
    grid: passes::GRID,
    is_fine: false,
    improved: 2_000,
    actions: 30_000_000,
};

/// A first search. Its gap decides whether a longer search is worth its time. Not tuned.
pub(crate) const QUICK: WorkBudget =
    WorkBudget { labels: 300_000, work: 2_500_000_000, labels_of_pass: 300_000, work_of_pass: 1_200_000_000, ..WHOLE };

/// A search for a plan that is only a comparison: about 10 ms. Not tuned.
pub(crate) const SHORT: WorkBudget = WorkBudget {
    labels: 50_000,
    work: 300_000_000,
    labels_of_pass: 50_000,
    work_of_pass: 300_000_000,
    in_flight_values: 2,
    behind: 1,
    improved: 100,
    actions: 1_000_000,
    ..WHOLE
};

impl WorkBudget {
    /// Returns the budget of each of `count` simultaneous passes, after `labels` and `work` were spent.
    pub(crate) fn shared_out(self, labels: u64, work: u64, count: u64) -> Self {
        // Sizes differ in the work that they need, so each may take more than its fair share of what is left. Every
        // pass gets a minimum, since a pass that stops at once proves nothing.
        let fair = |all: u64, spent: u64| passes::UNEVEN * all.saturating_sub(spent) / count.max(1);
        Self {
            labels_of_pass: self.labels_of_pass.min((fair(self.labels, labels) as usize).max(passes::MIN_LABELS)),
            work_of_pass: self.work_of_pass.min(fair(self.work, work).max(passes::MIN_WORK)),
            ..self
        }
    }

    /// Returns the budget with at most this much work.
    pub(crate) fn within(self, work: u64) -> Self {
        Self { work: self.work.min(work), ..self }
    }

    /// Returns the budget for node-aligned placements, whose bound is not the one over all placements: half of the
    /// work. Fewer labels suffice, since there are fewer placements.
    ///
    /// Measured on seeds 5, 8 and 9 of `benches/questions.py`. With the limits of [`QUICK`], and [`annealing::SPARK`]
    /// in place of [`annealing::BRIEF`], the plan of seed 5 is 1.2 % longer. With half of all limits of [`WHOLE`], no
    /// step or bound changes, and seed 5 makes 21 % more labels.
    pub(crate) fn node_aligned(self) -> Self {
        Self {
            labels: self.labels / 3,
            work: self.work / 2,
            labels_of_pass: self.labels_of_pass / 3,
            work_of_pass: QUICK.work,
            ..self
        }
    }

    /// Returns the budget for passes over the relaxed space. There are more of these passes, and each has a lower
    /// limit: it only has to prove that no plan is below its threshold.
    pub(crate) fn relaxed(self, is_fine: bool) -> Self {
        Self {
            is_fine,
            labels: passes::RELAXED_LABELS,
            labels_of_pass: passes::RELAXED_LABELS_OF_PASS,
            work_of_pass: passes::RELAXED_WORK_OF_PASS,
            // The relaxed space has no plans that could be simulated or improved.
            improved: 0,
            actions: 0,
            ..self
        }
    }
}
