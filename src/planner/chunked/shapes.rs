//! Where the search starts: sizes, groups of devices, and balanced cuts between them.

use crate::cost::Model;
use crate::cost::network::Cluster;
use crate::planner::hybrid::Settings;
use crate::schedule::{Family, Request};

use super::MOST_ACTIONS;

/// All that a search decides but the cuts and how many devices each group has in the end.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Shape {
    pub(super) micro_batch: u32,
    pub(super) recompute: bool,
    /// Stages on each device.
    pub(super) chunks: u32,
    pub(super) placement: Placement,
    /// Devices of each group, to start with.
    pub(super) replicas: Vec<u32>,
}

/// The order in which devices are given to the groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Placement {
    /// Machine by machine: neighbouring groups are on one machine where that is possible.
    Append,
    /// One of each machine in turn: a group's replicas are on many machines, and each machine has parts of all groups.
    Scatter,
}

impl Placement {
    /// All devices in this order.
    pub(super) fn line(self, cluster: &Cluster) -> Vec<u32> {
        let mut begins = Vec::with_capacity(cluster.machines.len());
        let mut begin = 0;
        for machine in &cluster.machines {
            begins.push(begin);
            begin += machine.devices;
        }
        match self {
            Self::Append => (0..begin).collect(),
            Self::Scatter => {
                let most = cluster.machines.iter().map(|machine| machine.devices).max().unwrap_or(0);
                let turn = |at: u32| {
                    (cluster.machines.iter().zip(&begins))
                        .filter(move |(machine, _)| at < machine.devices)
                        .map(move |(_, begin)| begin + at)
                };
                (0..most).flat_map(turn).collect()
            }
        }
    }
}

/// Cut points one behind the other: all of a chain, and of a branching model those that each hold the last.
pub(super) fn row(model: &Model) -> Vec<usize> {
    let mut row = vec![0];
    for cut in 1..model.cuts() {
        let last = row[row.len() - 1];
        if model.is_inside(last, cut) {
            row.push(cut);
        }
    }
    row
}

/// Every shape worth a trial, for a model of so many layers, or parts that can't be cut.
pub(super) fn shapes(
    cluster: &Cluster,
    settings: &Settings,
    family: &Family,
    (chunks, sizes): (&[u32], &[u32]),
    layers: usize,
) -> Vec<Shape> {
    let devices = cluster.devices();
    let placements: &[Placement] =
        if cluster.machines.len() > 1 { &[Placement::Append, Placement::Scatter] } else { &[Placement::Append] };
    let mut shapes: Vec<Shape> = Vec::new();
    for &micro_batch in sizes {
        let micro_batches = settings.global_batch / micro_batch;
        for ranks in depths(devices, layers as u32) {
            for &chunks in chunks {
                let stages = u64::from(ranks) * u64::from(chunks);
                let request = Request { chunks: Some(chunks), ..Request::new(ranks, micro_batches) };
                if stages > layers as u64
                    || stages > u64::from(settings.most_stages)
                    || 3 * stages * u64::from(micro_batches) > MOST_ACTIONS
                    || family.sizes(&request).is_err()
                {
                    continue;
                }
                for replicas in replicas(settings, micro_batch, devices, ranks) {
                    for &placement in placements {
                        if placement == Placement::Scatter && replicas[0] == 1 {
                            continue; // neighbours would be on different machines for nothing
                        }
                        shapes.extend(settings.recompute.iter().map(|&recompute| Shape {
                            micro_batch,
                            recompute,
                            chunks,
                            placement,
                            replicas: replicas.clone(),
                        }));
                    }
                }
            }
        }
    }
    shapes
}

/// Numbers of groups worth trying: powers of two, and those that use all devices with as many in each.
fn depths(devices: u32, most: u32) -> Vec<u32> {
    let most = most.min(devices);
    (2..=most).filter(|&ranks| ranks.is_power_of_two() || devices.is_multiple_of(ranks)).collect()
}

/// Numbers of devices of each group: as many for all as can share a micro-batch, and one more for the first ones where
/// devices are left over.
fn replicas(settings: &Settings, micro_batch: u32, devices: u32, ranks: u32) -> Vec<Vec<u32>> {
    let even = devices / ranks;
    let Some(each) = (1..=even).rev().find(|&each| settings.share(micro_batch, each).is_some()) else {
        return Vec::new();
    };
    let mut all = vec![vec![each; ranks as usize]];
    let left = devices % ranks;
    if each == even && left > 0 && !settings.equal_replicas && settings.share(micro_batch, even + 1).is_some() {
        all.push((0..ranks).map(|rank| even + u32::from(rank < left)).collect());
    }
    all
}

/// Places in the row around each stage, so that the longest stage is as short as it can be; `seconds_before[stage]` are
/// the seconds of all layers before each place, on the devices of that stage.
///
/// There are at least as many layers as stages.
pub(super) fn balanced(seconds_before: &[&[f64]]) -> Vec<usize> {
    let stages = seconds_before.len();
    let last = seconds_before[0].len() - 1;
    let ends = |limit_s: f64| {
        let mut ends = Vec::with_capacity(stages + 1);
        ends.push(0);
        for (stage, before) in seconds_before.iter().enumerate() {
            let begin = ends[stage];
            let full = before.partition_point(|&seconds| seconds <= before[begin] + limit_s) - 1;
            ends.push(full.min(last - (stages - 1 - stage)).max(begin + 1));
        }
        ends
    };
    let longest = |ends: &[usize]| {
        ends.windows(2).zip(seconds_before).map(|(two, before)| before[two[1]] - before[two[0]]).fold(0.0, f64::max)
    };
    let whole = seconds_before.iter().map(|before| before[last]).fold(0.0, f64::max);
    let (mut low_s, mut high_s) = (0.0, whole);
    for _ in 0..50 {
        let middle_s = low_s + (high_s - low_s) / 2.0;
        let found = ends(middle_s);
        if found[stages] >= last && longest(&found) <= middle_s {
            high_s = middle_s;
        } else {
            low_s = middle_s;
        }
    }
    let mut found = ends(high_s);
    found[stages] = last;
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The shortest longest stage, by trying all cuts.
    fn least_longest_s(seconds: &[f64], stages: usize) -> f64 {
        if stages == 1 {
            return seconds.iter().sum();
        }
        (1..=seconds.len() + 1 - stages)
            .map(|first| {
                let head: f64 = seconds[..first].iter().sum();
                head.max(least_longest_s(&seconds[first..], stages - 1))
            })
            .fold(f64::INFINITY, f64::min)
    }

    #[test]
    fn balanced_cuts_have_the_shortest_longest_stage() {
        let seconds = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0];
        let mut before = vec![0.0];
        for second in seconds {
            before.push(before[before.len() - 1] + second);
        }
        for stages in [1, 2, 3, 5, 8] {
            let ends = balanced(&vec![&before[..]; stages]);
            assert_eq!((ends.len(), ends[0], ends[stages]), (stages + 1, 0, seconds.len()));
            assert!(ends.windows(2).all(|two| two[0] < two[1]), "{ends:?}");
            let longest = ends.windows(2).map(|two| before[two[1]] - before[two[0]]).fold(0.0, f64::max);
            assert!((longest - least_longest_s(&seconds, stages)).abs() < 1e-9, "{ends:?}");
        }
    }
}
