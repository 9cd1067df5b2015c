//! Limits and temperatures of annealing, which changes plans at random before their numbers in flight are chosen.

/// Limits on the length of one annealing. A walk is one run of all its chains, from the first to the last round.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AnnealingTime {
    /// Work of the first walk for each pair of a cut and a device.
    pub of_cut_and_device: u64,
    /// Limit on the work of the first walk.
    pub max: u64,
    /// Number of first walks for which annealing continues after it found no better plan, beyond twice the work until
    /// the best plan.
    pub patience: u64,
    /// Limit on the work of all walks together, as a multiple of the first walk.
    pub all: u64,
    /// Limit on the work of all walks together.
    pub within: u64,
    /// Whether patterns with a longer step than the best plan take part.
    pub is_wide: bool,
}

/// Annealing before the first pass of a small problem: 1 to 10 ms. Measured on 140 problems: with [`BRIEF`] in its
/// place, no step or bound changes, but two problems of 26 ms and 34 ms take 1.5 times as long.
pub(crate) const SPARK: AnnealingTime =
    AnnealingTime { of_cut_and_device: 2_000, max: 10_000_000, patience: 0, all: 1, within: u64::MAX, is_wide: false };
/// Annealing before the bound of a large problem: 10 to 100 ms on two threads. Measured: with [`SPARK`] in its place,
/// the bound of seed 5 of `benches/questions.py` is 0.1 % lower.
pub(crate) const BRIEF: AnnealingTime =
    AnnealingTime { of_cut_and_device: 10_000, max: 20_000_000, all: 10, is_wide: true, ..SPARK };
/// Annealing of a plan that is not proven good: 0.25 to 1 s. Not tuned.
pub(crate) const LONG: AnnealingTime =
    AnnealingTime { of_cut_and_device: 100_000, max: 200_000_000, patience: 3, ..BRIEF };
/// Annealing at the end of a search, for as long as it helps. Not tuned.
pub(crate) const LAST: AnnealingTime = AnnealingTime { patience: 20, all: 160, ..LONG };

impl AnnealingTime {
    /// Returns the limits with at most this much work.
    pub(crate) fn within(self, work: u64) -> Self {
        Self { within: self.within.min(work), ..self }
    }
}

// Limits on single plans. A simulation takes much longer than the paths of a plan, so only the plans with the shortest
// paths are simulated.

/// Smallest share by which a walk must shorten the step to count as help. Not tuned.
pub(crate) const MIN_HELP: f64 = 1e-3;
/// Longest path of a pattern in a wide annealing, as a multiple of the best step. Not tuned.
pub(crate) const WIDE_FACTOR: f64 = 2.0;
/// Number of pattern plans that are simulated. Not tuned.
pub(crate) const PATTERNS_SIMULATED: usize = 32;
/// Number of plans that are simulated after each round. Not tuned.
pub(crate) const ROUND_SIMULATED: usize = 8;
/// Number of relaxed plans that are placed, and of placed plans that are kept. Not tuned.
pub(crate) const PLACED: usize = 8;
/// Limit on the actions of these simulations: 0.15 s. Not tuned.
pub(crate) const SIMULATED_ACTIONS: u64 = 5_000_000;

// Schedule of temperatures. Work, chains and random numbers depend on the problem alone, never on the number of
// threads.

/// Chains at the start of a walk. Each round keeps the better half. Measured: at 40 and at 160, no step or bound of the
/// 12 problems changes.
pub(crate) const MAX_CHAINS: usize = 80;
/// Smallest number of chains of a walk, even if its work suffices for fewer. Not tuned.
pub(crate) const MIN_CHAINS: usize = 4;
/// Target for the changes of each chain, in all rounds together. Few long chains find better plans than many short
/// ones. Measured: at 2,500 and at 10,000, no step or bound of the 12 problems changes.
pub(crate) const CHANGES_PER_CHAIN: u64 = 5_000;
/// Temperature of the first round: about the share of the path by which a change may lengthen it. Measured: at 0.015
/// and at 0.06, no step or bound of the 12 problems changes. At 0.06, one problem makes 70 % more labels, since its
/// first plan is longer.
pub(crate) const FIRST_TEMPERATURE: f64 = 0.03;
/// Factor of the temperature from round to round. Measured: at 0.35 and at 1.4, no step or bound of the 12 problems
/// changes. First plans are longer, so all problems together make 51 % and 4 % more labels.
pub(crate) const ROUND_COOLING: f64 = 0.7;
/// Factor of the temperature from the first to the last change of a round. Measured: at 0.1, no step or bound of the 12
/// problems changes.
pub(crate) const COOLING_IN_ROUND: f64 = 0.05;

// The last search, around the best plan.

/// Temperatures of the first rounds of its walks, in turn. Measured on three problems of 32 and 64 devices: with either
/// of them alone, one of the three steps stays 0.1 % longer.
pub(crate) const AROUND_TEMPERATURES: [f64; 2] = [0.003, 0.0003];
/// Number of chains of a walk. Not tuned.
pub(crate) const AROUND_CHAINS: usize = 8;
/// Work of a walk for each pair of a cut and a device. Not tuned.
pub(crate) const AROUND_OF_CUT_AND_DEVICE: u64 = 50_000;
/// Limit on the work of a walk: 50 ms on two threads. Not tuned.
pub(crate) const AROUND_MAX: u64 = 100_000_000;
/// Number of walks in a row without a shorter step after which the search ends. Not tuned.
pub(crate) const AROUND_PATIENCE: usize = 6;
/// Limit on the walks: 2 s on two threads. Not tuned.
pub(crate) const AROUND_WALKS: usize = 40;
/// Ratio of step to bound up to which no gap counts as left, since rounding may cause it. Not tuned.
pub(crate) const CLOSED: f64 = 1.0 + 1e-6;

// Annealing may pass through plans that lack memory, since these may connect one plan that fits to another.

/// Penalty for missing memory: added to the path of a plan for each device capacity that it lacks, as a multiple of the
/// path. Not tuned.
pub(crate) const SHORTFALL_PENALTY: f64 = 3.0;
/// Number of chains up to which plans are simulated, not only bounded, before they count as shorter. Not tuned.
pub(crate) const SIMULATING_CHAINS: usize = 10;
/// Number of gradient all-reduce times that a chain keeps. Not tuned.
pub(crate) const KEPT_SYNCS: usize = 4096;
/// Limit on the actions of a plan that is simulated during annealing: 3 ms. Not tuned.
pub(crate) const MAX_SIMULATED_ACTIONS: u64 = 100_000;
/// Largest number of adjacent cuts that move at once before annealing. Not tuned.
pub(crate) const MAX_RUN: usize = 8;
/// Smallest share by which a round of moving cuts must shorten the path for another round. Not tuned.
pub(crate) const SETTLED: f64 = 1e-3;
/// Work between two checks of the time limit and of Ctrl-C: 0.2 ms. Not tuned.
pub(crate) const UNWATCHED_WORK: u64 = 200_000;
