//! Lemma *Memory* (docs/proofs.md#memory): conditions that every plan meets whose stages fit the devices' memory.
//!
//! If one of them fails for each micro-batch size, no plan fits, and no search is needed. The converse is false: they
//! leave out links, speeds and nodes, so even if all of them hold, there may be no plan that fits.

mod layers;
mod slices;
mod stage_rows;

use crate::planner::effort::bounds;
use crate::planner::hybrid::{settings::Settings, subproblem::Subproblem};
use rayon::prelude::*;
use slices::Slices;
use stage_rows::Ends;

use crate::control::Control;
use crate::cost::LayerSums;
use crate::cost::network::Cluster;
use crate::error::Result;
use crate::model::lineage::Lineage;

/// Plans for which a condition must hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Schedules {
    /// Whether stages warm up as the settings state. If not, a stage may hold a single micro-batch.
    pub warms_up: bool,
    /// Whether each device has one stage.
    pub one_stage_a_device: bool,
}

impl Schedules {
    /// Plans with the schedule of the settings, and one stage per device.
    pub const OF_SETTINGS: Self = Self { warms_up: true, one_stage_a_device: true };
}

/// Tolerance for sums in another order, as a share of the whole model's memory.
const ROUNDING: f64 = 1e-9;

/// Returns whether it is certain that no plan fits the devices' memory. `false` means that nothing is known.
///
/// # Errors
/// [`crate::Error::Argument`] or [`crate::Error::Cluster`] for invalid input.
pub fn nothing_fits(
    model: &LayerSums,
    cluster: &Cluster,
    settings: &Settings,
    schedules: Schedules,
    control: &Control,
) -> Result<bool> {
    is_infeasible(model, cluster, settings, schedules, &[bounds::MAX_CHECKED, bounds::MAX_CHECKED_AGAIN], control)
}

/// Returns the result of [`nothing_fits`] for the settings' schedule, after a check of limited effort that more often
/// returns `false`.
///
/// # Errors
/// The errors of [`nothing_fits`].
pub(crate) fn nothing_fits_at_a_glance(
    model: &LayerSums,
    cluster: &Cluster,
    settings: &Settings,
    control: &Control,
) -> Result<bool> {
    is_infeasible(model, cluster, settings, Schedules::OF_SETTINGS, &[bounds::MAX_CHECKED_BRIEFLY], control)
}

/// Returns whether it is certain that no plan fits. `max_checked` has the limit on checked replica counts for each
/// round.
fn is_infeasible(
    model: &LayerSums,
    cluster: &Cluster,
    settings: &Settings,
    schedules: Schedules,
    max_checked: &[usize],
    control: &Control,
) -> Result<bool> {
    settings.check()?;
    cluster.check()?;
    let tasks = Subproblem::all(model, cluster, settings);
    let conditions: Vec<Conditions> = tasks.iter().map(|task| Conditions::new(task, schedules)).collect();
    // The conditions on stages take longest. So check the conditions on layers for all sizes first.
    let open: Vec<&Conditions> = conditions.iter().filter(|each| each.fit_layers()).collect();
    if !(model.has_all_cuts && schedules.one_stage_a_device) {
        return Ok(open.is_empty());
    }
    Ok(no_rows_fit(&open, &Ends::Cuts(model), max_checked, control))
}

/// Returns whether it is certain that no row of stages fits for any micro-batch size.
fn no_rows_fit(sizes: &[&Conditions<'_>], ends: &Ends<'_>, max_checked: &[usize], control: &Control) -> bool {
    let mut open = sizes.to_vec();
    // Sizes share the limit of a round evenly. Later rounds have fewer sizes left and a higher limit, so each gets
    // more.
    for limit in max_checked {
        let max_of_size = limit / open.len().max(1);
        // One size with a row that fits decides the answer. Sizes without a result get a higher limit in the next
        // round.
        let rows = open.par_iter().map(|each| match each.check_row(ends, max_of_size, control) {
            Row::Fits => Err(()),
            Row::Unknown => Ok(Some(*each)),
            Row::Fails => Ok(None),
        });
        let Ok(unknown) = rows.collect::<std::result::Result<Vec<_>, ()>>() else { return false };
        open = unknown.into_iter().flatten().collect();
        if open.is_empty() {
            return true;
        }
    }
    false
}

/// Result of condition 3 or 4 for one micro-batch size.
enum Row {
    /// A row of stages fits, so the condition proves nothing.
    Fits,
    /// No row of stages fits, so no plan does.
    Fails,
    /// The limit was reached, or the search was stopped, before a result.
    Unknown,
}

/// Returns whether it is certain that no plan with any cuts of the layer graph fits, not only with the cuts of `model`.
/// Without a `lineage`, only the conditions on layers are checked.
///
/// # Errors
/// The errors of [`nothing_fits`].
pub fn nothing_fits_with_any_cuts(
    model: &LayerSums,
    lineage: Option<&Lineage>,
    cluster: &Cluster,
    settings: &Settings,
    schedules: Schedules,
    control: &Control,
) -> Result<bool> {
    settings.check()?;
    cluster.check()?;
    let tasks = Subproblem::all(model, cluster, settings);
    let conditions: Vec<Conditions> = tasks.iter().map(|task| Conditions::new(task, schedules)).collect();
    let open: Vec<&Conditions> = conditions.iter().filter(|each| each.fit_layers()).collect();
    let Some(lineage) = lineage.filter(|_| schedules.one_stage_a_device && !open.is_empty()) else {
        return Ok(open.is_empty());
    };
    let ends = Ends::Slices(Slices::new(model, lineage));
    Ok(no_rows_fit(&open, &ends, &[bounds::MAX_CHECKED, bounds::MAX_CHECKED_AGAIN], control))
}

/// The conditions on plans of one micro-batch size.
struct Conditions<'a> {
    task: &'a Subproblem<'a>,
    schedules: Schedules,
    /// Pairs `(capacity_bytes, devices)`: the number of devices with at least this free memory, by rising capacity.
    capacities: Vec<(f64, u32)>,
    /// Triples `(min_replicas, max_replicas, totals)`: replica counts with the same samples, and the index of its layer
    /// sums.
    replica_ranges: Vec<(u32, u32, usize)>,
}

impl<'a> Conditions<'a> {
    /// Returns the conditions on plans with these schedules.
    fn new(task: &'a Subproblem<'a>, schedules: Schedules) -> Self {
        let mut devices: Vec<(f64, u32)> =
            task.cluster.nodes.iter().map(|node| (node.memory_bytes, node.devices)).collect();
        devices.sort_by(|a, b| b.0.total_cmp(&a.0));
        let mut capacities: Vec<(f64, u32)> = Vec::new();
        let mut count = 0;
        for (memory_bytes, devices) in devices {
            count += devices;
            let capacity_bytes = memory_bytes - task.settings.memory.reserved_bytes;
            match capacities.last_mut() {
                Some((last, all)) if last.total_cmp(&capacity_bytes).is_eq() => *all = count,
                _ => capacities.push((capacity_bytes, count)),
            }
        }
        capacities.reverse();
        let mut replica_ranges: Vec<(u32, u32, usize)> = Vec::new();
        for (replicas, totals_index) in (0_u32..).zip(&task.totals_index) {
            let Some(totals_index) = totals_index.map(|totals_index| totals_index as usize) else { continue };
            match replica_ranges.last_mut() {
                Some((_, max_replicas, last)) if *last == totals_index => *max_replicas = replicas,
                _ => replica_ranges.push((replicas, replicas, totals_index)),
            }
        }
        Self { task, schedules, capacities, replica_ranges }
    }

    /// Returns the smallest capacity of at least `needed_bytes`. Returns `None` if fewer than `replicas` devices have
    /// as much.
    fn capacity_bytes(&self, needed_bytes: f64, replicas: u32) -> Option<f64> {
        let at = self.capacities.partition_point(|&(capacity_bytes, _)| capacity_bytes < needed_bytes);
        self.capacities.get(at).filter(|&&(_, devices)| replicas <= devices).map(|&(capacity_bytes, _)| capacity_bytes)
    }

    /// Returns the smallest number of micro-batches that a stage may hold. `from_end` counts the stages behind its
    /// begin, itself included.
    fn in_flight(&self, from_end: u32) -> u32 {
        if self.schedules.warms_up { self.task.settings.max_in_flights(from_end, self.task.micro_batches).0 } else { 1 }
    }

    /// Returns the bytes that a device holds at least per byte of trained weights, with gradients and optimizer state,
    /// and per byte of frozen weights.
    fn bytes_per_weight_byte(&self, replicas: u32) -> (f64, f64) {
        self.task.settings.memory.least().per_weight_byte(replicas)
    }
}
