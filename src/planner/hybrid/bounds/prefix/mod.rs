//! Lower bounds on what the stages in front of a cut (the *prefix*) add to a plan's step time.
//!
//! The search builds plans from the last stage to the first. A partial plan is a *suffix*: the stages behind a cut,
//! with the lengths of their critical paths ([`Paths`]). The tables here answer one question: given the cut, the number
//! of free devices and the number of stages behind the cut, by how much must *any* prefix lengthen each of these paths?
//! The search drops a suffix if the sum reaches the threshold. So every entry must be a lower bound: the tables are an
//! admissible heuristic, as in A*.
//!
//! One dynamic program over cuts and device counts fills the tables, from the first cut to the last ([`builder`]). Four
//! relaxations keep them small. Each can only lower an entry, so the bound stays valid:
//!
//! 1. **Placement.** A stage gets the fastest links that any placement has ([`adjacency`]).
//! 2. **Mixed devices.** Devices of different speed count as integer units. A stage is assigned to one class and takes
//!    at least the units of the devices that it would take ([`device_levels`]).
//! 3. **Rounding.** Device counts are rounded up to levels, and similar replica counts share a bucket
//!    ([`replica_buckets`]). Where a model has many cuts, groups of them share an entry ([`group_pairs`]).
//! 4. **Independent minima.** Each of the eight increments is minimized by itself, over all prefixes ([`increments`]).
//!
//! docs/proofs.md, *Stages in front*, proves each increment. `bounds/tests` holds them against simulated pipelines.

mod adjacency;
mod builder;
mod device_levels;
mod group_pairs;
mod increments;
mod replica_buckets;
mod resolution;

use crate::control::Control;
use crate::cost::Totals;
use crate::planner::effort::tables;
use crate::planner::hybrid::{
    bounds::{devices_at_work::busy_s, link_bounds::Links, paths::Paths},
    subproblem::Subproblem,
};
use increments::fast_max;
use resolution::TableAxes;
use std::sync::Arc;

#[cfg(test)]
pub(crate) use increments::INCREMENTS;
pub(crate) use increments::PrefixIncrements;

/// The tables of one micro-batch size and one threshold.
pub(crate) struct PrefixBounds {
    axes: Arc<TableAxes>,
    /// Number of placement cases. With 1, a stage may be placed anywhere. Otherwise case 0 stands for a stage behind
    /// the cut that is spread over nodes, and case 1 + *n* for one on a single node that leaves *n* devices free there.
    placement_cases: usize,
    /// One table for each number of stages behind the cut. The last one also serves larger numbers.
    tables: Vec<Table>,
    /// Device time of all micro-batches in front of each cut, on devices of speed 1.
    busy_s: Vec<f64>,
    /// Work of building the tables, in units of [`crate::planner::effort::work`].
    pub work: u64,
}

/// Key of an entry, except for the cut.
#[derive(Debug, Clone, Copy)]
pub(crate) struct EntryKey {
    /// Index of the table, which is the number of stages behind the cut or the largest one that has a table.
    table: usize,
    placement_case: usize,
    device_level: usize,
}

/// Increments of the prefixes of all groups of cuts, for one number of stages behind the cut.
#[derive(Clone)]
struct Table {
    /// Entries of each group of cuts, by placement case and device level. Empty where no prefix fits.
    increments: Vec<Vec<PrefixIncrements>>,
    /// Lowest device level with a plan below the threshold, by group of cuts and placement case. `usize::MAX` if none
    /// has one.
    first_level: Vec<usize>,
}

impl PrefixBounds {
    /// Builds tables for a pass. They leave out stages that reach the threshold by themselves. At most `max_behind`
    /// numbers of stages behind a cut have separate tables. If it is 0, placement has a single case. Returns `None` if
    /// the search was stopped.
    pub(crate) fn new(
        task: &Subproblem<'_>,
        links: &Links,
        threshold_s: f64,
        max_behind: usize,
        control: &Control,
    ) -> Option<Self> {
        Self::with(task, links, threshold_s, max_behind, tables::PASS_RESOLUTION, control)
    }

    /// Returns the key of prefixes with `free` units of devices and `behind` stages behind them. `free_devices` are
    /// left on the node of the stage behind them; `None` if this stage is on several nodes.
    pub(crate) fn place(&self, free: u32, free_devices: Option<u32>, behind: u32) -> EntryKey {
        EntryKey {
            table: (behind as usize).min(self.tables.len() - 1),
            placement_case: free_devices.map_or(0, |devices| 1 + devices as usize).min(self.placement_cases - 1),
            device_level: self.axes.device_levels.level(free),
        }
    }

    /// Returns the entry of a cut.
    fn at(&self, cut: usize, EntryKey { table, placement_case, device_level }: EntryKey) -> &PrefixIncrements {
        let group = self.axes.groups.of_cut[cut] as usize;
        // Below the lowest level of its group, the devices cannot do the work in front of the cut in time.
        if device_level < self.axes.device_levels.of_group[group].0 {
            return &PrefixIncrements::INFEASIBLE;
        }
        let entry = self.axes.device_levels.entry(group, placement_case, device_level);
        self.tables[table].increments[group].get(entry).unwrap_or(&PrefixIncrements::INFEASIBLE)
    }

    /// Returns a lower bound on the time of any plan from its first forward to its last backward.
    pub(crate) fn min_s(&self) -> f64 {
        let last = self.at(self.axes.groups.of_cut.len() - 1, self.place(u32::MAX, None, 0));
        last.round_trip_s.max(last.backward_busy_s).max(last.forward_busy_s)
    }

    /// Returns the round trip of one micro-batch through the prefix of a cut. Infinite if no prefix fits.
    pub(crate) fn round_trip_s(&self, cut: usize, place: EntryKey) -> f64 {
        self.at(cut, place).round_trip_s
    }

    /// Returns a lower bound on the step of plans whose prefix has devices with this sum of speeds (*Devices at work*).
    pub(crate) fn busy_s(&self, cut: usize, free_speed: f64) -> f64 {
        // The factor keeps rounding from lifting the bound above a step that is equal to it.
        if cut == 0 { 0.0 } else { self.busy_s[cut] / free_speed * (1.0 - 1e-12) }
    }

    /// Returns a lower bound on the step of plans that end in a suffix with these paths: the longest of the eight sums.
    pub(crate) fn bound_s(&self, paths: &Paths, cut: usize, place: EntryKey) -> f64 {
        self.at(cut, place).step_bounds_s(paths).into_iter().fold(f64::NEG_INFINITY, fast_max)
    }

    /// Returns a lower bound on the step of every plan.
    pub(crate) fn whole_s(&self) -> f64 {
        self.bound_s(&Paths::default(), self.axes.groups.of_cut.len() - 1, self.place(u32::MAX, None, 0))
    }
}

/// Returns the time of each layer for one micro-batch at speed 1. `totals` has the sums for a replica.
fn layers_s(task: &Subproblem<'_>, totals: &Totals) -> Vec<f64> {
    let forwards = task.recompute.min_forwards();
    let both = totals.layer_forward_s.iter().zip(&totals.layer_backward_s);
    both.map(|(forward_s, backward_s)| forwards * forward_s + backward_s).collect()
}

/// Returns a lower bound on the step from fine tables below a threshold, and the work of building them.
pub(crate) fn tabled_s(task: &Subproblem<'_>, links: &Links, threshold_s: f64, control: &Control) -> (f64, u64) {
    PrefixBounds::with(task, links, threshold_s, usize::MAX, tables::BISECTION_RESOLUTION, control)
        .map_or((0.0, 0), |tables| (tables.whole_s(), tables.work))
}

/// Returns a lower bound on the step, and the work of finding it. The bound is the longer of two: all devices work all
/// the time, or the bound of tables with a single placement case.
///
/// A bound of `threshold_s` or more means only that no plan is shorter than the threshold. If the search was stopped,
/// only the first part counts.
pub(crate) fn min_step_s(task: &Subproblem<'_>, links: &Links, threshold_s: f64, control: &Control) -> (f64, u64) {
    let busy_s = busy_s(task);
    // Small micro-batches on a large cluster end here, before any table is built.
    if busy_s >= threshold_s {
        return (busy_s, 0);
    }
    let (tables_s, work) = PrefixBounds::new(task, links, threshold_s, 0, control)
        .map_or((0.0, 0), |tables| (tables.whole_s(), tables.work));
    (tables_s.max(busy_s), work)
}
