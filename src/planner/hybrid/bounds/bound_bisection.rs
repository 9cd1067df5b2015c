//! Lemma *A pass* (docs/proofs.md#a-pass), for all placements: if a complete pass over the relaxed space finds no plan
//! below a threshold, no plan is shorter than the threshold.
//!
//! The threshold of each micro-batch size rises until it reaches the best step or a pass exceeds its work limit. Tables
//! alone come first: a threshold below which they leave no plan needs no pass.

use crate::planner::effort::{ALL_WORK, WHOLE, WorkBudget, bounds, passes, tables};
use crate::planner::hybrid::{
    bounds::prefix,
    search::suffix_search::{PassResult, SuffixSearch},
    settings::Settings,
    subproblem::Subproblem,
};
use rayon::prelude::*;

use crate::control::Control;
use crate::cost::LayerSums;
use crate::cost::network::Cluster;
use crate::error::Result;

/// Bound and history of passes of one micro-batch size.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct BoundProgress {
    /// Lower bound on the step of its plans in any placement, in seconds.
    pub bound_s: f64,
    /// Whether no further pass over the relaxed space can raise the bound.
    pub is_done: bool,
    /// Smallest threshold below which the prefix tables left plans.
    open_s: Option<f64>,
    /// Whether the last tables took little work.
    are_tables_fast: bool,
    /// Rise of the next threshold above the bound, after the first pass.
    rise_s: Option<f64>,
    /// Threshold of the last complete pass, which is the highest, and the work of its labels.
    completed: Option<(f64, u64)>,
    /// Number of passes that reached their limits.
    failed: u32,
    /// Threshold of the last such pass, which is the lowest.
    failed_s: Option<f64>,
    /// Smallest work limit that was too little for a pass.
    insufficient_work: Option<u64>,
}

impl BoundProgress {
    /// Forgets all passes, and keeps the bound and what is known of tables.
    fn reopen(&mut self) {
        let Self { bound_s, open_s, are_tables_fast, .. } = *self;
        *self = Self { bound_s, open_s, are_tables_fast, ..Self::default() };
    }

    /// Continues in the refined space, if that may raise the bound and its passes are likely to be complete.
    fn refine(&mut self, suffixes: &mut SuffixSearch<'_>, is_fine: bool, allowed: u64) {
        let is_affordable = self.completed.is_some_and(|(_, work)| bounds::REFINED_FACTOR * work <= allowed);
        if (is_fine || suffixes.has_joined_ranges()) && is_affordable && suffixes.refine() {
            self.reopen();
            self.rise_s = Some(bounds::REFINED_RISE * self.bound_s);
        }
    }
}

/// Labels and work that raising the bounds took.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Spent {
    pub labels: u64,
    pub work: u64,
}

/// Raises the bounds of all sizes towards `step_s`, the lowest first, until the budget `effort` is used up. Returns
/// what it took of it.
pub(crate) fn raise(
    sizes: &mut [(&mut SuffixSearch<'_>, &mut BoundProgress)],
    step_s: f64,
    effort: WorkBudget,
    control: &Control,
) -> Spent {
    let mut spent = Spent::default();
    let unknown = sizes.par_iter_mut().filter(|(_, known)| known.bound_s <= 0.0);
    spent.work += (unknown)
        .map(|(suffixes, known)| {
            let (first_s, work) = prefix::min_step_s(&suffixes.task, suffixes.links(true), step_s, control);
            known.bound_s = known.bound_s.max(first_s.min(step_s));
            work
        })
        .sum::<u64>();
    // A pass that exceeded its work limit may be complete under a much larger limit, so try such sizes again.
    let count = sizes.iter().filter(|(_, known)| !known.is_done || known.insufficient_work.is_some()).count() as u64;
    let allowed = effort.shared_out(0, 0, count).work_of_pass;
    for (suffixes, known) in sizes.iter_mut() {
        let is_more = known.insufficient_work.is_some_and(|then| allowed as f64 > bounds::RETRY_FACTOR * then as f64);
        let is_exhausted = known.is_done && known.insufficient_work.is_none();
        if is_more {
            known.reopen();
        } else if is_exhausted {
            // This space can prove no more. The refined one distinguishes more numbers of replicas.
            known.refine(suffixes, effort.is_fine, allowed);
        }
    }
    // The bound of the problem is the smallest over all sizes. So no other size needs to rise above the bound of a size
    // that is done.
    let mut max_s = step_s;
    loop {
        for (_, known) in sizes.iter().filter(|(_, known)| known.is_done) {
            max_s = max_s.min(known.bound_s);
        }
        let min_s = sizes.iter().map(|(_, known)| known.bound_s).fold(f64::INFINITY, f64::min);
        let is_spent = spent.labels >= effort.labels || spent.work >= effort.work;
        if min_s >= max_s || is_spent || control.should_stop() {
            return spent;
        }
        // Low thresholds cost little, and what they prove stays proven if a later pass is interrupted. So rise in
        // steps.
        let rise_s = (passes::RISE * (step_s - min_s)).max(passes::MIN_RISE * step_s);
        let limit_s = if step_s.is_finite() { max_s.min(min_s + rise_s) } else { step_s };
        let is_open = |known: &BoundProgress| !known.is_done && known.bound_s < limit_s;
        let count = sizes.iter().filter(|(_, known)| is_open(known)).count() as u64;
        let effort = effort.shared_out(spent.labels, spent.work, count);
        let mut bounds: Vec<f64> =
            sizes.iter().filter(|(_, known)| is_open(known)).map(|(_, known)| known.bound_s).collect();
        bounds.sort_by(f64::total_cmp);
        // Raise the sizes with the lowest bounds first, as they decide the bound of the problem.
        let lowest_s = bounds.get(bounds::SIZES_AT_ONCE - 1).copied().unwrap_or(f64::INFINITY);
        let open = sizes.par_iter_mut().filter(|(_, known)| is_open(known) && known.bound_s <= lowest_s);
        let found: Vec<Spent> = open
            .map(|(suffixes, known)| {
                let open_s = known.open_s.unwrap_or(f64::INFINITY);
                if max_s.is_finite() && open_s > known.bound_s + bounds::TABLE_TOLERANCE * limit_s {
                    raise_by_tables(suffixes, known, (limit_s, max_s), effort, control)
                } else {
                    raise_by_pass(suffixes, known, limit_s, effort, control)
                }
            })
            .collect();
        for each in found {
            spent.labels += each.labels;
            spent.work += each.work;
        }
    }
}

/// Raises the bound of one size by tables alone.
fn raise_by_tables(
    suffixes: &SuffixSearch<'_>,
    known: &mut BoundProgress,
    (limit_s, max_s): (f64, f64),
    effort: WorkBudget,
    control: &Control,
) -> Spent {
    // If tables take little work, try the highest useful threshold at once: it often completes a size.
    let max_s = if known.are_tables_fast { max_s } else { limit_s };
    // Bisect between the bound and the smallest threshold that left plans.
    let limit_s = known.open_s.map_or(max_s, |open_s| max_s.min(known.bound_s.midpoint(open_s)));
    let (min_s, work) = prefix::tabled_s(&suffixes.task, suffixes.links(true), limit_s, control);
    if min_s < limit_s {
        known.open_s = Some(limit_s);
    }
    known.bound_s = known.bound_s.max(min_s.min(limit_s));
    known.are_tables_fast = bounds::FAST_TABLES * work < effort.work;
    Spent { labels: 0, work }
}

/// Raises the bound of one size by a pass over the relaxed space.
fn raise_by_pass(
    suffixes: &mut SuffixSearch<'_>,
    known: &mut BoundProgress,
    limit_s: f64,
    effort: WorkBudget,
    control: &Control,
) -> Spent {
    let allowed = effort.work_of_pass;
    let before_s = known.bound_s;
    let rise_s = known.rise_s.unwrap_or(bounds::FIRST_RISE * before_s);
    let limit_s = limit_s.min(before_s + rise_s);
    let nearer_s = known.failed_s.map(|failed_s| known.bound_s + bounds::NEXT_SHARE * (failed_s - known.bound_s));
    let limit_s = limit_s.min(nearer_s.unwrap_or(f64::INFINITY));
    let Some(found) = suffixes.relaxed_pass(limit_s, effort, control) else {
        known.is_done = true;
        return Spent::default();
    };
    let PassResult { shortest_s, bound_s, labels, work, tables, .. } = found;
    known.bound_s = known.bound_s.max(shortest_s.min(bound_s).min(limit_s));
    if bound_s < shortest_s.min(limit_s) {
        known.failed += 1;
        known.failed_s = Some(limit_s);
        known.is_done = known.failed >= bounds::MAX_FAILED_PASSES;
        known.insufficient_work = known.insufficient_work.min(Some(allowed)).or(Some(allowed));
    } else {
        let is_near_failure =
            known.failed_s.is_some_and(|failed_s| failed_s < (1.0 + bounds::MIN_DISTANCE) * known.bound_s);
        // The work of a pass grows fast with the threshold, so the rise doubles only after a pass that took very
        // little.
        let part = work as f64 / allowed as f64;
        let wanted_s = if part < bounds::LITTLE_WORK { 2.0 * rise_s } else { rise_s };
        // The work of labels grows by about the same factor over equal distances of the threshold. So the last two
        // passes predict how far the next one can rise within its work limit.
        let now = (limit_s, (work - tables).max(allowed / bounds::MIN_SHARE));
        let likely_s = known.completed.replace(now).map_or(f64::INFINITY, |(before_s, before)| {
            let grown = (now.1 as f64 / before as f64).ln();
            let left =
                (bounds::PREDICTED_SHARE * allowed.saturating_sub(tables).max(1) as f64 / now.1 as f64).ln().max(0.0);
            if grown > 0.0 { left * (limit_s - before_s) / grown } else { f64::INFINITY }
        });
        known.rise_s = Some(wanted_s.min(likely_s));
        let is_hopeless = is_near_failure || likely_s < bounds::MIN_PREDICTED_RISE * known.bound_s;
        // A share of a bound of 0 is no rise, and neither is one that rounding swallows: the next pass would be this one.
        known.is_done = shortest_s < limit_s || is_hopeless || known.bound_s <= before_s;
        if shortest_s < limit_s {
            known.insufficient_work = None; // The bound of this space is found, so more work can't raise it.
            known.refine(suffixes, effort.is_fine, allowed);
        } else if is_hopeless {
            known.insufficient_work = known.insufficient_work.min(Some(allowed)).or(Some(allowed));
        }
    }
    Spent { labels, work }
}

/// Returns a lower bound on the step over all plans and placements, in seconds. Passes rise no higher than `below_s`.
///
/// [`crate::planner::hybrid::plan`] gives this bound for clusters with too many placements to try all of them. It holds
/// for small clusters, too, where tests compare it with [`crate::planner::hybrid::exhaustive`].
///
/// # Errors
/// [`crate::Error::Argument`] or [`crate::Error::Cluster`] for invalid input.
pub fn min_step_s(
    model: &LayerSums,
    cluster: &Cluster,
    settings: &Settings,
    below_s: f64,
    control: &Control,
) -> Result<f64> {
    settings.check()?;
    cluster.check()?;
    Ok(min_step_of_ranges_s(model, cluster, settings, (below_s, tables::MAX_JOINED_RANGES), control))
}

/// Returns the bound of [`min_step_s`] for valid input. The relaxed spaces begin with at most about `max_ranges` ranges
/// of replica counts.
pub(super) fn min_step_of_ranges_s(
    model: &LayerSums,
    cluster: &Cluster,
    settings: &Settings,
    (below_s, max_ranges): (f64, usize),
    control: &Control,
) -> f64 {
    let mut sizes: Vec<(SuffixSearch<'_>, BoundProgress)> = Subproblem::all(model, cluster, settings)
        .into_iter()
        .map(|task| (SuffixSearch::relaxed(task, max_ranges), BoundProgress::default()))
        .collect();
    let mut each: Vec<(&mut SuffixSearch<'_>, &mut BoundProgress)> =
        sizes.iter_mut().map(|(suffixes, known)| (suffixes, known)).collect();
    raise(&mut each, below_s, WHOLE.within(ALL_WORK / 2).relaxed(true), control);
    sizes.iter().map(|(_, known)| known.bound_s).fold(below_s, f64::min)
}
