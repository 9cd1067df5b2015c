//! Weights that several layers share (tied weights), where cuts put these layers into different stages.
//!
//! The first layer of a tied weight counts it among its own parameters. Devices that hold another layer of the tie, but
//! not the first, hold a copy. Where several groups of devices hold the weight, its gradients are reduced over all of
//! their devices at once, after all that each group reduces by itself.

use super::layer_sums::LayerSums;

/// A weight that layers share.
#[derive(Debug, Clone)]
pub struct TiedWeight {
    /// Bytes of the weight.
    pub bytes: f64,
    /// The layers that share the weight, as positions in topological order, each with whether it is below each cut. The
    /// first one counts the weight among its parameters.
    pub holders: Vec<(u32, Vec<bool>)>,
}

impl TiedWeight {
    /// Returns whether the stage between two cuts has the layer that counts the weight, and whether it has any layer of
    /// the tie.
    fn is_in(&self, (begin, end): (usize, usize)) -> (bool, bool) {
        let mut holds = self.holders.iter().map(|(_, is_below)| is_below[end] && !is_below[begin]);
        let counts = holds.next().unwrap_or(false);
        (counts, counts || holds.any(|holds| holds))
    }
}

/// Copies and extra all-reduces of a stage that come from weights it shares with other stages.
#[derive(Debug, Clone, Default)]
pub struct Shared {
    /// Bytes of copies that the stage's devices hold beside the weights of its layers.
    pub copied_bytes: f64,
    /// Layers, as positions in topological order, with the bytes of their weights that the stage does not reduce alone.
    pub apart: Vec<(u32, f64)>,
    /// Bytes that the stage reduces together with others, and all groups of devices that take part, its own included.
    pub sums: Vec<(f64, Vec<u32>)>,
}

/// Returns the copies and extra all-reduces of each of the stages between the given cuts. Stages with equal `group_of`
/// are on the same devices.
#[must_use]
pub fn shared(model: &LayerSums, stages: &[(usize, usize)], group_of: &[u32]) -> Vec<Shared> {
    let mut all = vec![Shared::default(); stages.len()];
    for tie in &model.tied_weights {
        // A group holds the weight once, however many of its stages use it, so only its first such stage counts.
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
        // A weight of zero bytes must not pay latency, and a weight inside one group is reduced by its own stage.
        if firsts.len() > 1 && tie.bytes > 0.0 {
            let groups: Vec<u32> = firsts.iter().map(|&(group, _)| group).collect();
            for &(_, stage) in &firsts {
                all[stage].sums.push((tie.bytes, groups.clone()));
            }
            // The layer's own all-reduce must leave these bytes out, or they would be reduced twice.
            if let Some(counts) = counts {
                all[counts].apart.push((tie.holders[0].0, tie.bytes));
            }
        }
    }
    all
}

/// Returns the bytes of copies that the stage between two cuts holds if no other stage is on its devices.
#[must_use]
pub fn copied_bytes(model: &LayerSums, stage: (usize, usize)) -> f64 {
    copies(model, stage).sum()
}

/// Returns the bytes of each of the copies of [`copied_bytes`].
pub fn copies(model: &LayerSums, stage: (usize, usize)) -> impl Iterator<Item = f64> {
    let is_copied = move |tie: &&TiedWeight| tie.is_in(stage) == (false, true);
    model.tied_weights.iter().filter(is_copied).map(|tie| tie.bytes)
}
