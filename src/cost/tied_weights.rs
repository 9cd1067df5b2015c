//! Weights that layers share, where cuts part them.
//!
//! The first layer of a tie counts the weight among its own parameters. Devices that hold another layer of the tie, and not
//! the first, hold a copy. Where several groups of devices hold the weight, its gradients are summed over all of their
//! devices at once, behind all that each of them sums by itself.

use super::layer_sums::LayerSums;

/// A weight that layers share.
#[derive(Debug, Clone)]
pub struct TiedWeight {
    /// Of the weight.
    pub bytes: f64,
    /// The layers that have it, as positions in topological order, each with whether it is below each cut; the one that
    /// counts it comes first.
    pub holders: Vec<(u32, Vec<bool>)>,
}

impl TiedWeight {
    /// Whether the stage between two cuts has the layer that counts the weight, and whether it has any that shares it.
    fn is_in(&self, (begin, end): (usize, usize)) -> (bool, bool) {
        let mut holds = self.holders.iter().map(|(_, is_below)| is_below[end] && !is_below[begin]);
        let counts = holds.next().unwrap_or(false);
        (counts, counts || holds.any(|holds| holds))
    }
}

/// What a stage has to do with weights that others share.
#[derive(Debug, Clone, Default)]
pub struct Shared {
    /// Bytes of copies that its devices hold beside the weights of their layers.
    pub copied_bytes: f64,
    /// Layers, as positions in topological order, and bytes of their weights that the stage doesn't sum alone.
    pub apart: Vec<(u32, f64)>,
    /// Bytes that it sums with others, and the groups that do, its own among them.
    pub sums: Vec<(f64, Vec<u32>)>,
}

/// What each of the stages between these cuts has to do with weights that others share; `group_of` says which of them are
/// on the same devices.
#[must_use]
pub fn shared(model: &LayerSums, stages: &[(usize, usize)], group_of: &[u32]) -> Vec<Shared> {
    let mut all = vec![Shared::default(); stages.len()];
    for tie in &model.ties {
        // For each group that holds the weight, the first of its stages that does; and who counts it.
        let mut firsts: Vec<(u32, usize)> = Vec::new();
        let mut counts = None;
        for (stage, &cuts) in stages.iter().enumerate() {
            let (counts_it, holds_it) = tie.is_in(cuts);
            if counts_it {
                counts = Some(stage);
            }
            if holds_it && firsts.iter().all(|&(group, _)| group != group_of[stage]) {
                firsts.push((group_of[stage], stage));
            }
        }
        for &(group, stage) in &firsts {
            if counts.is_none_or(|counts| group_of[counts] != group) {
                all[stage].copied_bytes += tie.bytes;
            }
        }
        if firsts.len() > 1 && tie.bytes > 0.0 {
            let groups: Vec<u32> = firsts.iter().map(|&(group, _)| group).collect();
            for &(_, stage) in &firsts {
                all[stage].sums.push((tie.bytes, groups.clone()));
            }
            if let Some(counts) = counts {
                all[counts].apart.push((tie.holders[0].0, tie.bytes));
            }
        }
    }
    all
}

/// Bytes of copies that the stage between two cuts holds beside the weights of its layers, on devices of its own.
#[must_use]
pub fn copied_bytes(model: &LayerSums, stage: (usize, usize)) -> f64 {
    let is_copied = |tie: &&TiedWeight| tie.is_in(stage) == (false, true);
    model.ties.iter().filter(is_copied).map(|tie| tie.bytes).sum()
}
