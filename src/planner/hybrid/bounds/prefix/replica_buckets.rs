//! Replica counts that share one entry of the tables.
//!
//! A stage of a bucket costs at most what any of its replica counts costs: it takes the devices of the fewest replicas, and
//! has the work, the transfers and the sharded optimizer of the most (docs/proofs.md, *Devices that differ*).

use super::adjacency::StageAdjacency;
use crate::cost::network::Rate;
use crate::planner::hybrid::{bounds::device_classes::DeviceClass, subproblem::Subproblem};

/// Replica counts that give their devices about the same share of a micro-batch.
pub(super) struct ReplicaBucket {
    pub(super) share: u32,
    /// The smallest count leaves most devices to other stages and has the shortest all-reduce.
    pub(super) fewest: u32,
    /// The largest count has the shortest transfers and the smallest shards of the optimizer.
    pub(super) most: u32,
    /// Device classes that its stages may have.
    pub(super) kinds: Vec<BucketUsage>,
    pub(super) ways: Vec<StageAdjacency>,
    /// Distinct pairs of an all-reduce rate and the speed of the backwards that it overlaps.
    pub(super) rates: Vec<(Rate, f64)>,
    /// Index of this pair for each class of each adjacency.
    pub(super) rate_of: Vec<usize>,
    /// Each layer takes at least this multiple of its shortest time over all buckets.
    pub(super) slower: f64,
}

/// Devices that a bucket uses of one class, at its smallest replica count.
pub(super) struct BucketUsage {
    /// Speed of the slowest device, and free memory of the smallest.
    pub(super) speed: f64,
    pub(super) memory_bytes: f64,
    /// Fewest units that these devices count.
    pub(super) units: u32,
    /// For each level from `first` on, which has enough units, the level of the units that are left.
    pub(super) rests: Vec<usize>,
    pub(super) first: usize,
}

impl BucketUsage {
    /// Returns the lowest level that leaves at least the level `least`.
    pub(super) fn with_rest(&self, least: usize) -> usize {
        // Levels are about as far apart everywhere, so it is about as many levels up.
        let mut at = least.min(self.rests.len());
        while at > 0 && self.rests[at - 1] >= least {
            at -= 1;
        }
        while at < self.rests.len() && self.rests[at] < least {
            at += 1;
        }
        self.first + at
    }
}

impl ReplicaBucket {
    /// Returns the buckets of a subproblem. Replica counts of one bucket differ by at most the factor `apart`, unless
    /// they give the same share.
    pub(super) fn all(task: &Subproblem<'_>, kinds: &[(DeviceClass, Vec<(u32, u32)>)], apart: f64) -> Vec<Self> {
        let mut splits: Vec<Self> = Vec::new();
        for (count, share) in (0_u32..).zip(&task.share) {
            let Some(share) = *share else { continue };
            match splits.last_mut() {
                Some(split) if split.share == share => split.most = count,
                // The work of many replicas on the devices of few.
                Some(split) if f64::from(count) <= apart * f64::from(split.fewest) => {
                    (split.most, split.share) = (count, share);
                }
                _ => splits.push(Self {
                    share,
                    fewest: count,
                    most: count,
                    kinds: Vec::new(),
                    ways: Vec::new(),
                    rates: Vec::new(),
                    rate_of: Vec::new(),
                    slower: 1.0,
                }),
            }
        }
        for split in &mut splits {
            for (kind, each) in kinds.iter().filter(|(kind, _)| kind.devices >= split.fewest) {
                let mut left = split.fewest;
                let taken = BucketUsage {
                    speed: kind.speed,
                    memory_bytes: kind.memory_bytes - task.settings.memory.reserved_bytes,
                    units: (each.iter())
                        .map(|&(units, devices)| {
                            let some = left.min(devices);
                            left -= some;
                            some * units
                        })
                        .sum(),
                    rests: Vec::new(),
                    first: 0,
                };
                // More memory for as much speed, and for no more units, is the better choice for all.
                split.kinds.retain(|other| other.speed < taken.speed || other.units < taken.units);
                split.kinds.push(taken);
            }
        }
        splits
    }
}
