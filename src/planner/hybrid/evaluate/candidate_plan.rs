//! Everything that a search decides about a plan.

use crate::cost::network::Cluster;

/// One stage of a plan: layers between two cuts on devices of some machines.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StageCandidate {
    /// The cut below its first layer.
    pub begin: usize,
    /// The cut above its last layer.
    pub end: usize,
    /// `(machine, devices)`, ascending, none of them zero.
    pub footprint: Vec<(u32, u32)>,
    /// Forwards ahead of the first backward; the largest number of micro-batches in flight.
    pub window: u32,
}

impl StageCandidate {
    /// Devices it takes.
    #[must_use]
    pub fn replicas(&self) -> u32 {
        self.footprint.iter().map(|&(_, count)| count).sum()
    }
}

/// Everything that a search decides.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CandidatePlan {
    /// Samples that enter the pipeline at once.
    pub micro_batch: u32,
    /// Whether activations are recomputed.
    pub recompute: bool,
    /// First stage first.
    pub stages: Vec<StageCandidate>,
}

impl CandidatePlan {
    /// Device numbers of each stage: on every machine, earlier stages take lower numbers.
    #[must_use]
    pub fn devices(&self, cluster: &Cluster) -> Vec<Vec<u32>> {
        let mut next = Vec::with_capacity(cluster.machines.len());
        let mut devices = 0;
        for machine in &cluster.machines {
            next.push(devices);
            devices += machine.devices;
        }
        let mut take = |&(machine, count): &(u32, u32)| {
            let first = next[machine as usize];
            next[machine as usize] += count;
            first..first + count
        };
        self.stages.iter().map(|stage| stage.footprint.iter().flat_map(&mut take).collect()).collect()
    }

    /// Those of its stages.
    pub(crate) fn windows(&self) -> Vec<u32> {
        self.stages.iter().map(|stage| stage.window).collect()
    }

    /// The same stages with other windows.
    #[must_use]
    pub fn with_windows(mut self, windows: &[u32]) -> Self {
        self.stages.iter_mut().zip(windows).for_each(|(stage, &window)| stage.window = window);
        self
    }
}
