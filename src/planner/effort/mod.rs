//! How much work a search may do: every tuned constant of the planner is in this folder.
//!
//! A constant is in one of three states, which its comment names:
//!
//! - *Derived*: it follows from something else, which the comment names.
//! - *Measured*: the comment says on what, and what changes at other values. "The 12 problems" are seeds 2, 4, 17, 24 and 26,
//!   `vgg-16-8x8`, `chain-167-2x8` and `resnet101-2x8` of `benches/questions.py`, and four of the built-in models on 2 × 8
//!   devices. They have 120,000 labels and 330 simulated plans together.
//! - *Not tuned*: nobody compared values. A change may be free.
//!
//! No value makes a bound wrong or an answer invalid. The values trade the length of the step and the quality of the bound
//! for time and memory.
//!
//! Searches count work instead of time, so that an answer does not depend on the machine or its load. [`work`] defines the
//! unit. Three levels of work exist: [`SHORT`] for a plan that is only compared with, [`QUICK`] for a first look, and
//! [`WHOLE`] for the answer.

pub(crate) mod annealing;
pub(crate) mod bounds;
pub(crate) mod chain;
pub(crate) mod orders;
pub(crate) mod passes;
pub(crate) mod placement;
pub(crate) mod tables;
pub(crate) mod work;

/// Limits on the work of a search. All parts of a search count the same unit, [`work`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct WorkBudget {
    /// Labels of all passes.
    pub labels: u64,
    /// Work of all passes.
    pub work: u64,
    /// Labels of one pass over one micro-batch size. A pass that reaches a limit drops its other labels, and its bound is
    /// that of the best one among them.
    pub labels_of_pass: usize,
    /// Work of one pass over one micro-batch size.
    pub work_of_pass: u64,
    /// Numbers of micro-batches in flight that a pass tells apart for each stage.
    pub in_flight_values: u32,
    /// Numbers of stages behind a cut for which a pass has separate tables.
    pub behind: usize,
    /// On more than [`passes::EXACT_DEVICES`] devices, paths are rounded down to multiples of the shortest conceivable step
    /// over this number.
    pub grid: f64,
    /// Whether the relaxed space refines ranges of replicas once it has no more to say.
    pub is_fine: bool,
    /// Plans that local search simulates.
    pub improved: u64,
    /// Actions that are simulated after a pass, and by local search.
    pub actions: u64,
}

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

/// A first look, after which it is clear whether better plans are worth a longer search. Not tuned.
pub(crate) const QUICK: WorkBudget =
    WorkBudget { labels: 300_000, work: 2_500_000_000, labels_of_pass: 300_000, work_of_pass: 1_200_000_000, ..WHOLE };

/// A plan that is only compared with: about 10 ms. Not tuned.
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
    /// Returns the budget of each of `count` passes at once, after some labels and some work were spent.
    pub(crate) fn shared_out(self, labels: u64, work: u64, count: u64) -> Self {
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

    /// Returns the budget for node-aligned placements, whose bound is not the one over all placements: half of the work. Fewer
    /// labels suffice, since there are fewer placements.
    ///
    /// Measured on seeds 5, 8 and 9 of `benches/questions.py`. With the limits of [`QUICK`], and [`annealing::SPARK`] in place
    /// of [`annealing::BRIEF`], the plan of seed 5 is 1.2 % longer. With half of all limits of [`WHOLE`], no step or bound
    /// changes, and seed 5 makes 21 % more labels.
    pub(crate) fn node_aligned(self) -> Self {
        Self {
            labels: self.labels / 3,
            work: self.work / 2,
            labels_of_pass: self.labels_of_pass / 3,
            work_of_pass: QUICK.work,
            ..self
        }
    }

    /// Returns the budget for passes over the relaxed space. There are more of them, and each takes less: a pass only has to
    /// show that nothing is below its threshold.
    pub(crate) fn relaxed(self, is_fine: bool) -> Self {
        Self {
            is_fine,
            labels: passes::RELAXED_LABELS,
            labels_of_pass: passes::RELAXED_LABELS_OF_PASS,
            work_of_pass: passes::RELAXED_WORK_OF_PASS,
            improved: 0,
            actions: 0,
            ..self
        }
    }
}
