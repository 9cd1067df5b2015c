//! Replica counts that share one entry of the tables.
//!
//! A stage of a bucket costs at most what any of its replica counts costs. It takes the devices of the smallest count,
//! and has the work, the transfers and the sharded optimizer of the largest (docs/proofs.md, *Devices that differ*).

use super::adjacency::StageAdjacency;
use crate::cost::Totals;
use crate::cost::network::Rate;
use crate::planner::hybrid::{bounds::device_classes::DeviceClass, subproblem::Subproblem};

/// Replica counts that give their devices about the same samples of a micro-batch.
pub(super) struct ReplicaBucket {
    /// Index into `Subproblem::totals` of the layer sums at the largest count.
    pub(super) totals_index: u32,
    /// Whether counts with other samples are in the bucket, too.
    is_joined: bool,
    /// Smallest count, which leaves most devices to other stages and has the shortest all-reduce.
    pub(super) min_replicas: u32,
    /// Largest count, which has the shortest transfers and the smallest shards of the optimizer.
    pub(super) max_replicas: u32,
    /// Device classes that stages of the bucket may have.
    pub(super) usages: Vec<BucketUsage>,
    /// Placements relative to the stage behind.
    pub(super) adjacencies: Vec<StageAdjacency>,
    /// Distinct pairs of an all-reduce rate and the speed of the backwards that it overlaps.
    pub(super) rates: Vec<(Rate, f64)>,
    /// Index of such a pair, for each usage of each adjacency.
    pub(super) rate_index: Vec<usize>,
    /// Smallest ratio, over all layers, of a layer's time in this bucket to its shortest time in any bucket.
    pub(super) min_slowdown: f64,
}

/// Devices that a bucket takes of one class, at its smallest replica count.
pub(super) struct BucketUsage {
    /// Speed of the slowest device.
    pub(super) speed: f64,
    /// Free memory of the smallest device.
    pub(super) memory_bytes: f64,
    /// Smallest sum of units of that many devices of the class.
    pub(super) units: u32,
    /// Levels of the units that are left, one for each level from `first_level` on.
    pub(super) levels_left: Vec<usize>,
    /// Lowest level with at least `units`.
    pub(super) first_level: usize,
}

impl BucketUsage {
    /// Returns the lowest level that leaves at least the level `min_left`.
    pub(super) fn level_leaving(&self, min_left: usize) -> usize {
        // Levels have nearly equal distances, so `min_left` itself is a close first guess of the index, and a linear
        // search from there takes fewer steps than bisection.
        let mut at = min_left.min(self.levels_left.len());
        while at > 0 && self.levels_left[at - 1] >= min_left {
            at -= 1;
        }
        while at < self.levels_left.len() && self.levels_left[at] < min_left {
            at += 1;
        }
        self.first_level + at
    }
}

impl ReplicaBucket {
    /// Returns layer sums that no count of the bucket goes below.
    pub(super) fn totals<'t>(&self, task: &'t Subproblem<'_>) -> &'t Totals {
        if self.is_joined { task.least_totals(self.totals_index) } else { &task.totals[self.totals_index as usize] }
    }

    /// Returns the buckets of a subproblem. Replica counts of one bucket differ by at most the factor `max_ratio`,
    /// unless they give the same samples.
    pub(super) fn all(task: &Subproblem<'_>, classes: &[(DeviceClass, Vec<(u32, u32)>)], max_ratio: f64) -> Vec<Self> {
        let mut buckets: Vec<Self> = Vec::new();
        for (count, totals_index) in (0_u32..).zip(&task.totals_index) {
            let Some(totals_index) = *totals_index else { continue };
            match buckets.last_mut() {
                Some(bucket) if bucket.totals_index == totals_index => bucket.max_replicas = count,
                // Work of the largest count on the devices of the smallest: both only lower the bound.
                Some(bucket) if f64::from(count) <= max_ratio * f64::from(bucket.min_replicas) => {
                    (bucket.max_replicas, bucket.totals_index) = (count, totals_index);
                    bucket.is_joined = true;
                }
                _ => buckets.push(Self {
                    totals_index,
                    is_joined: false,
                    min_replicas: count,
                    max_replicas: count,
                    usages: Vec::new(),
                    adjacencies: Vec::new(),
                    rates: Vec::new(),
                    rate_index: Vec::new(),
                    min_slowdown: 1.0,
                }),
            }
        }
        for bucket in &mut buckets {
            for (class, each) in classes.iter().filter(|(class, _)| class.devices >= bucket.min_replicas) {
                let mut missing = bucket.min_replicas;
                let usage = BucketUsage {
                    speed: class.speed,
                    memory_bytes: class.memory_bytes - task.settings.memory.reserved_bytes,
                    // Devices come with the fewest units first, so the sum is the smallest that any choice has.
                    units: (each.iter())
                        .map(|&(units, devices)| {
                            let taken = missing.min(devices);
                            missing -= taken;
                            taken * units
                        })
                        .sum(),
                    levels_left: Vec::new(),
                    first_level: 0,
                };
                // Classes are sorted by speed, then by memory. An earlier class of the same speed has less memory, so
                // it is never the better choice if it takes no fewer units.
                bucket.usages.retain(|other| other.speed < usage.speed || other.units < usage.units);
                bucket.usages.push(usage);
            }
        }
        buckets
    }
}
