//! Candidate plans: the decisions of a search, without costs.

use crate::cost::network::Cluster;
use crate::planner::hybrid::settings::Recompute;

/// One stage of a plan: the layers between two cuts, on devices of some nodes.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StageCandidate {
    /// Cut below its first layer.
    pub begin: usize,
    /// Cut above its last layer.
    pub end: usize,
    /// Pairs `(node, devices)`, ascending by node, without zero counts. Devices of a node are alike, so counts suffice.
    pub footprint: Vec<(u32, u32)>,
    /// Forwards before the first backward, which is the largest number of micro-batches in flight.
    pub max_in_flight: u32,
    /// Whether its backward passes recompute its activations.
    pub recompute: bool,
}

impl StageCandidate {
    /// Returns the number of devices, each of which holds one replica of the stage.
    #[must_use]
    pub fn replicas(&self) -> u32 {
        self.footprint.iter().map(|&(_, count)| count).sum()
    }
}

/// A plan with everything that a search decides.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CandidatePlan {
    /// Samples of a micro-batch over all replicas of a stage.
    pub micro_batch: u32,
    /// Stages in the order of the model.
    pub stages: Vec<StageCandidate>,
}

impl CandidatePlan {
    /// Returns the device numbers of each stage. On every node, earlier stages take lower numbers.
    #[must_use]
    pub fn devices(&self, cluster: &Cluster) -> Vec<Vec<u32>> {
        let mut next = Vec::with_capacity(cluster.nodes.len());
        let mut devices = 0;
        for node in &cluster.nodes {
            next.push(devices);
            devices += node.devices;
        }
        // Each node hands out its devices in the order of the stages, so the numbers follow from the counts.
        let mut take = |&(node, count): &(u32, u32)| {
            let first = next[node as usize];
            next[node as usize] += count;
            first..first + count
        };
        self.stages.iter().map(|stage| stage.footprint.iter().flat_map(&mut take).collect()).collect()
    }

    /// Returns the number of micro-batches in flight of each stage.
    pub(crate) fn max_in_flights(&self) -> Vec<u32> {
        self.stages.iter().map(|stage| stage.max_in_flight).collect()
    }

    /// Returns the plan with its stages under a choice of recomputation. If that leaves it to each stage, the stages stay
    /// as they are.
    #[must_use]
    pub fn with_recompute(mut self, choice: Recompute) -> Self {
        if let &[recompute] = choice.of_stage() {
            self.stages.iter_mut().for_each(|stage| stage.recompute = recompute);
        }
        self
    }

    /// Returns whether the stages are allowed under a choice of recomputation.
    pub(crate) fn allows_recompute(&self, choice: Recompute) -> bool {
        self.stages.iter().all(|stage| choice.of_stage().contains(&stage.recompute))
    }

    /// Returns the plan with other numbers of micro-batches in flight.
    #[must_use]
    pub fn with_max_in_flights(mut self, max_in_flights: &[u32]) -> Self {
        self.stages
            .iter_mut()
            .zip(max_in_flights)
            .for_each(|(stage, &max_in_flight)| stage.max_in_flight = max_in_flight);
        self
    }
}
