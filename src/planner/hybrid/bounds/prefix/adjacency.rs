//! Placements of a stage relative to the stage behind it.
//!
//! Lemma *Links of any placement* (docs/proofs.md) bounds the transfer of each case from below. Of the nodes, a table
//! knows only how many devices are free on the node of the stage behind the cut (its placement case).

use super::replica_buckets::ReplicaBucket;
use crate::cost::network::Rate;
use crate::planner::hybrid::bounds::link_bounds::{Links, min_rate};

/// One placement of a stage relative to the stage behind it, with the shortest transfer and all-reduce.
pub(super) struct StageAdjacency {
    /// Placement case of the stage behind.
    pub(super) behind: usize,
    /// Placement case that this stage is for the stage in front of it.
    pub(super) own: usize,
    pub(super) transfer: Rate,
    pub(super) sync: Rate,
}

impl ReplicaBucket {
    /// Returns the smallest and the largest replica count.
    pub(super) fn span(&self) -> (u32, u32) {
        (self.min_replicas, self.max_replicas)
    }

    /// Returns all adjacencies of the bucket. With a single placement case they are merged into one, whose rates are
    /// the smallest of all.
    pub(super) fn find_adjacencies(&self, links: &Links, placement_cases: usize) -> Vec<StageAdjacency> {
        let span = self.span();
        let all = (1, links.spans.last().map_or(1, |span| span.1));
        let mut adjacencies = Vec::new();
        for own in links.spreads(span) {
            let sync = links.all_reduce_spread(own);
            let beside_spread = links.any_spread(own);
            adjacencies.extend(beside_spread.map(|transfer| StageAdjacency { behind: 0, own: 0, transfer, sync }));
            adjacencies.push(StageAdjacency { behind: 1, own: 0, transfer: links.one_and_spread(all, own), sync });
        }
        if links.fits_one(span) {
            let sync = links.all_reduce_in_one(span);
            // The bucket takes the devices of its smallest count, so this many are free at most on a node of its own.
            let own = 1 + (links.widest - span.0) as usize;
            if links.nodes > 1 {
                // Case 0 also stands for the last stage, with nothing behind it. So it needs an adjacency even if no
                // stage can be spread.
                let transfer = links.one_and_any_spread(span).unwrap_or_else(|| links.apart());
                adjacencies.push(StageAdjacency { behind: 0, own, transfer, sync });
                // `TableBuilder::finish` copies this to all cases with more free devices.
                adjacencies.push(StageAdjacency { behind: 1, own, transfer: links.apart(), sync });
            } else {
                adjacencies.push(StageAdjacency { behind: 0, own, transfer: links.beside(span, all), sync });
            }
            for free_devices in span.0..links.widest {
                let (behind, own) = (1 + free_devices as usize, 1 + (free_devices - span.0) as usize);
                adjacencies.push(StageAdjacency { behind, own, transfer: links.beside(span, all), sync });
            }
        }
        if placement_cases > 1 {
            return adjacencies;
        }
        let merge = |one: StageAdjacency, other: StageAdjacency| StageAdjacency {
            behind: 0,
            own: 0,
            transfer: min_rate(one.transfer, other.transfer),
            sync: min_rate(one.sync, other.sync),
        };
        let merged = adjacencies.into_iter().reduce(merge);
        merged.map(|one| StageAdjacency { behind: 0, own: 0, ..one }).into_iter().collect()
    }
}
