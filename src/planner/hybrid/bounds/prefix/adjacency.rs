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
    /// Shortest transfer from any stage in front.
    pub(super) receive: Rate,
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
            let receive = links.to_stage(span, None);
            let adjacency = |behind, transfer| StageAdjacency { behind, own: 0, transfer, sync, receive };
            adjacencies.extend(links.any_spread(own).map(|transfer| adjacency(0, transfer)));
            adjacencies.push(adjacency(1, links.one_and_spread(all, own)));
        }
        if links.fits_one(span) {
            let sync = links.all_reduce_in_one(span);
            let adjacency = |behind, free_devices: u32, transfer| StageAdjacency {
                behind,
                own: 1 + free_devices as usize,
                transfer,
                sync,
                receive: links.to_stage(span, Some(free_devices)),
            };
            // The bucket takes the devices of its smallest count, so this many are free at most on a node of its own.
            let max_free = links.widest - span.0;
            if links.nodes > 1 {
                // Case 0 also stands for the last stage, with nothing behind it. So it needs an adjacency even if no
                // stage can be spread.
                let transfer = links.one_and_any_spread(span).unwrap_or_else(|| links.apart());
                adjacencies.push(adjacency(0, max_free, transfer));
                // `TableBuilder::finish` copies this to all cases with more free devices.
                adjacencies.push(adjacency(1, max_free, links.apart()));
            } else {
                adjacencies.push(adjacency(0, max_free, links.beside(span, all)));
            }
            for free_devices in span.0..links.widest {
                let behind = 1 + free_devices as usize;
                adjacencies.push(adjacency(behind, free_devices - span.0, links.beside(span, all)));
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
            receive: min_rate(one.receive, other.receive),
        };
        let merged = adjacencies.into_iter().reduce(merge);
        merged.map(|one| StageAdjacency { behind: 0, own: 0, ..one }).into_iter().collect()
    }
}
