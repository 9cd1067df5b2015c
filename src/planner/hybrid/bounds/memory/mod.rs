//! Lemma *Memory* (docs/proofs.md#memory): conditions that every plan meets whose stages fit the devices' memory.
//!
//! Where one of them fails for each micro-batch size, no plan fits, and no search is needed. They leave out what a plan may
//! avoid (links, speeds, nodes), so a plan that meets all of them may still not exist.

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

/// Which plans a condition is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Schedules {
    /// Whether the warm-up is that of the settings. Otherwise a stage may hold a single micro-batch.
    pub warms_up: bool,
    /// Whether each device has one stage.
    pub one_stage_a_device: bool,
}

impl Schedules {
    /// The schedule of the settings.
    pub const OF_SETTINGS: Self = Self { warms_up: true, one_stage_a_device: true };
}

/// Share of the whole model's memory that sums in another order may differ by.
const ROUNDING: f64 = 1e-9;

/// Returns whether it is certain that no plan fits the devices' memory. `false` means that nothing is known.
///
/// # Errors
/// [`crate::Error::Argument`] or [`crate::Error::Cluster`] for input that makes no sense.
pub fn nothing_fits(
    model: &LayerSums,
    cluster: &Cluster,
    settings: &Settings,
    schedules: Schedules,
    control: &Control,
) -> Result<bool> {
    shows(model, cluster, settings, schedules, &[bounds::MAX_CHECKED, bounds::MAX_CHECKED_AGAIN], control)
}

/// Returns the same for the settings' schedule after a short look.
///
/// # Errors
/// As [`nothing_fits`].
pub(crate) fn nothing_fits_at_a_glance(
    model: &LayerSums,
    cluster: &Cluster,
    settings: &Settings,
    control: &Control,
) -> Result<bool> {
    shows(model, cluster, settings, Schedules::OF_SETTINGS, &[bounds::MAX_CHECKED_BRIEFLY], control)
}

/// Returns the same if in each turn so many splits may be priced.
fn shows(
    model: &LayerSums,
    cluster: &Cluster,
    settings: &Settings,
    schedules: Schedules,
    turns: &[usize],
    control: &Control,
) -> Result<bool> {
    settings.check()?;
    cluster.check()?;
    let tasks = Subproblem::all(model, cluster, settings);
    let conditions: Vec<Conditions> = tasks.iter().map(|task| Conditions::new(task, schedules)).collect();
    // The conditions on stages take longest, so those on layers come first for all sizes.
    let open: Vec<&Conditions> = conditions.iter().filter(|each| each.fit_layers()).collect();
    if !(model.has_all_cuts && schedules.one_stage_a_device) {
        return Ok(open.is_empty());
    }
    Ok(no_rows_fit(&open, &Ends::Cuts(model), turns, control))
}

/// Returns whether it is certain that no row of stages fits for any micro-batch size.
fn no_rows_fit(sizes: &[&Conditions<'_>], ends: &Ends<'_>, turns: &[usize], control: &Control) -> bool {
    let mut open = sizes.to_vec();
    for priced in turns {
        let max_priced = priced / open.len().max(1);
        // A size for which a row fits ends all of it. Those for which nothing is known yet are looked at more closely.
        let rows = open.par_iter().map(|each| match each.row(ends, max_priced, control) {
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

/// Whether stages of one micro-batch size can follow one another.
enum Row {
    Fits,
    Fails,
    /// What was priced does not tell.
    Unknown,
}

/// Returns whether [`nothing_fits`] is certain of it whatever the cuts of `model` are: of one with a `lineage`, all cuts
/// count.
///
/// # Errors
/// As [`nothing_fits`].
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
    /// For each amount of memory that some device has, ascending, how many devices have at least that much.
    capacities: Vec<(f64, u32)>,
    /// For each share the fewest and the most replicas that get it, and the index of its totals.
    splits: Vec<(u32, u32, usize)>,
}

impl<'a> Conditions<'a> {
    fn new(task: &'a Subproblem<'a>, schedules: Schedules) -> Self {
        let mut devices: Vec<(f64, u32)> =
            task.cluster.machines.iter().map(|machine| (machine.memory_bytes, machine.devices)).collect();
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
        let mut splits: Vec<(u32, u32, usize)> = Vec::new();
        for (replicas, share) in (0_u32..).zip(&task.share) {
            let Some(share) = share.map(|share| share as usize) else { continue };
            match splits.last_mut() {
                Some((_, most, last)) if *last == share => *most = replicas,
                _ => splits.push((replicas, replicas, share)),
            }
        }
        Self { task, schedules, capacities, splits }
    }

    /// Returns the smallest capacity that `replicas` devices have which need so much each. `None` if there are too few of
    /// them.
    fn capacity_bytes(&self, needed_bytes: f64, replicas: u32) -> Option<f64> {
        let at = self.capacities.partition_point(|&(capacity_bytes, _)| capacity_bytes < needed_bytes);
        self.capacities.get(at).filter(|&&(_, devices)| replicas <= devices).map(|&(capacity_bytes, _)| capacity_bytes)
    }

    /// Micro-batches that a stage holds at least, if so many stages, itself included, are behind its begin.
    fn in_flight(&self, from_end: u32) -> u32 {
        if self.schedules.warms_up { self.task.settings.max_in_flights(from_end, self.task.micro_batches).0 } else { 1 }
    }

    /// Bytes of a device for each byte of weights that it holds, shared by so many replicas.
    fn of_weight(&self, replicas: u32) -> f64 {
        let memory = &self.task.settings.memory;
        let sharing = if memory.shard_optimizer { f64::from(replicas) } else { 1.0 };
        1.0 + memory.gradients_per_weight + memory.optimizer_per_weight / sharing
    }
}
