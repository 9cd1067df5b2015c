//! Shares by speed: the division of a micro-batch among replicas of different speed.
//!
//! Each replica starts with the smallest number of samples that a replica may have. Then each further sample goes to the
//! replica whose forward and backward together would be the shortest with it. If more samples never take less time, no
//! division has a shorter longest replica (docs/proofs.md#shares-by-speed).

use crate::cost::network::Cluster;
use crate::cost::{Interpolation, LayerSums, Pace};

use super::candidate_plan::StageCandidate;

/// Times that differ by at most this share count as equal, so that rounding does not decide who gets a sample.
const EQUAL: f64 = 1e-9;

/// Replicas of a stage that have equal devices and equally many samples of each micro-batch.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct EqualReplicas {
    pub samples: u32,
    pub pace: Pace,
    /// Memory of the smallest device.
    pub memory_bytes: f64,
}

/// Samples of a micro-batch on the replicas of a stage.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Shares {
    /// Samples of each replica, in ascending order of the device numbers.
    pub of_each: Vec<u32>,
    /// Replicas by samples, speed and memory.
    pub groups: Vec<EqualReplicas>,
}

/// Devices of a stage with equal times.
struct Kind {
    pace: Pace,
    /// Positions among the devices of the stage, in ascending order.
    positions: Vec<usize>,
    /// Seconds of a forward and a backward at each measured batch size.
    measured_s: Vec<f64>,
    /// Number of samples that this kind has beyond the smallest share of each of its devices.
    more: usize,
    /// Seconds of its next device with one more sample.
    next_s: f64,
}

impl Kind {
    /// Returns the position of the device that gets the next sample: the first of those with the fewest.
    fn next(&self) -> usize {
        self.positions[self.more % self.positions.len()]
    }
}

impl Shares {
    /// Divides the micro-batch of a stage by the speed of its devices. Each gets `min_samples` or more, which must be
    /// enough for all. Returns `None` if all devices are of one speed, so that equal shares are the fastest.
    pub(crate) fn by_speed(
        model: &LayerSums,
        cluster: &Cluster,
        min_samples: u32,
        (micro_batch, stage): (u32, &StageCandidate),
    ) -> Option<Self> {
        let node_of = |&(node, count): &(u32, u32)| (0..count).map(move |_| &cluster.nodes[node as usize]);
        let devices: Vec<_> = stage.footprint.iter().flat_map(node_of).collect();
        let mut kinds: Vec<Kind> = Vec::new();
        for (position, &node) in devices.iter().enumerate() {
            let pace = Pace::NONE.with(node);
            match kinds.iter_mut().find(|kind| kind.pace.key() == pace.key()) {
                Some(kind) => kind.positions.push(position),
                None => {
                    kinds.push(Kind { pace, positions: vec![position], measured_s: Vec::new(), more: 0, next_s: 0.0 });
                }
            }
        }
        if kinds.len() < 2 {
            return None;
        }
        let sizes: Vec<f64> = model.batch_sizes().iter().map(|&size| f64::from(size)).collect();
        let after_next_s = |kind: &Kind| {
            let samples = min_samples + (kind.more / kind.positions.len()) as u32 + 1;
            Interpolation::new(&sizes, f64::from(samples)).of(&kind.measured_s)
        };
        for kind in &mut kinds {
            kind.measured_s = model.measured_s(kind.pace, (stage.begin, stage.end));
            kind.next_s = after_next_s(kind);
        }
        let mut of_each = vec![min_samples; devices.len()];
        for _ in min_samples * devices.len() as u32..micro_batch {
            // The kinds compete in the order of their next devices, so that the lowest number wins among equals.
            kinds.sort_unstable_by_key(Kind::next);
            let mut best = 0;
            for other in 1..kinds.len() {
                if kinds[other].next_s < kinds[best].next_s * (1.0 - EQUAL) {
                    best = other;
                }
            }
            let kind = &mut kinds[best];
            of_each[kind.next()] += 1;
            kind.more += 1;
            kind.next_s = after_next_s(kind);
        }
        let mut groups: Vec<EqualReplicas> = Vec::new();
        for (&samples, &node) in of_each.iter().zip(&devices) {
            let own = EqualReplicas { samples, pace: Pace::NONE.with(node), memory_bytes: node.memory_bytes };
            if !groups.contains(&own) {
                groups.push(own);
            }
        }
        Some(Self { of_each, groups })
    }
}
