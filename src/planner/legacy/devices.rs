//! Nodes as the original HPGO represents them: cumulative ends, and link speeds that are constants of the program.

use std::ops::Range;

use crate::error::{Error, Result};

/// Point-to-point rate between nodes.
const INTER_BYTES_PER_S: f64 = 1e9;
/// Rate of collectives between nodes.
const INTER_COLLECTIVE_BYTES_PER_S: f64 = 3e9;
/// Rate between two devices of a node.
const INTRA_BYTES_PER_S: f64 = 25e9;
/// Maximum number of devices. It limits the memory of the search's tables, and is far above the original's use.
const MAX_DEVICES: u32 = 1024;

/// Devices of a cluster, numbered from 0, node by node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Devices {
    /// Number of the device behind the last one of each node.
    ends: Vec<u32>,
}

impl Devices {
    /// Creates nodes whose last devices are `seps - 1`: `[8, 16]` stands for two nodes with eight devices each.
    ///
    /// # Errors
    /// Returns [`Error::Argument`] if `seps` is empty, does not ascend from above 0, or ends beyond 1024.
    pub fn new(seps: &[u32]) -> Result<Self> {
        let hint = "give the cumulative ends of the nodes: [8, 16] is two nodes of eight devices";
        let ascends = seps.is_sorted_by(|one, two| one < two);
        match (seps.first(), seps.last()) {
            (Some(&first), Some(&last)) if first > 0 && last <= MAX_DEVICES && ascends => {
                Ok(Self { ends: seps.to_vec() })
            }
            (Some(_), Some(&last)) if last > MAX_DEVICES && ascends => Err(Error::argument(
                format!("seps ends at {last}, but at most {MAX_DEVICES} devices are supported"),
                hint,
            )),
            (None, _) => Err(Error::argument("seps is empty", hint)),
            _ => Err(Error::argument(format!("seps is {seps:?}, which does not ascend from above 0"), hint)),
        }
    }

    /// Returns the number of devices.
    #[must_use]
    pub fn count(&self) -> u32 {
        self.ends[self.ends.len() - 1]
    }

    /// Returns the number of nodes.
    pub(super) fn nodes(&self) -> usize {
        self.ends.len()
    }

    /// Returns the devices of a node.
    pub(super) fn node(&self, node: usize) -> Range<u32> {
        (if node == 0 { 0 } else { self.ends[node - 1] })..self.ends[node]
    }

    /// Returns the node of a device.
    pub(super) fn node_of(&self, device: u32) -> usize {
        self.ends.partition_point(|&end| end <= device)
    }

    /// Returns the node of all `devices` if they are in the same one.
    fn only_node(&self, devices: &[u32]) -> Option<usize> {
        let node = self.node_of(*devices.first()?);
        devices.iter().all(|&device| self.node_of(device) == node).then_some(node)
    }

    /// Returns the first `count` devices, taken one from each node in turn, in ascending order.
    pub(super) fn scattered(&self, count: u32) -> Vec<u32> {
        // Nodes may have unequal numbers of devices: full ones are skipped in later rounds.
        let longest = (0..self.nodes()).map(|node| self.node(node).len()).max().unwrap_or(0);
        let rounds =
            (0..longest).flat_map(|round| (0..self.nodes()).filter_map(move |node| self.node(node).nth(round)));
        let mut taken: Vec<u32> = rounds.take(count as usize).collect();
        taken.sort_unstable();
        taken
    }

    /// Returns the seconds that an all-reduce of `bytes` among `devices` takes.
    ///
    /// A ring moves `2 (n - 1) / n` of the bytes: at 3 GB/s between nodes, over n/2 links of 25 GB/s inside a
    /// node.
    #[must_use]
    pub fn all_reduce_s(&self, devices: &[u32], bytes: f64) -> f64 {
        if devices.len() < 2 {
            return 0.0;
        }
        let count = devices.len() as f64;
        let moved = bytes * 2.0 * ((count - 1.0) / count);
        match self.only_node(devices) {
            Some(_) => moved / INTRA_BYTES_PER_S / (devices.len() / 2) as f64,
            None => moved / INTER_COLLECTIVE_BYTES_PER_S,
        }
    }

    /// Returns the seconds of a transfer of `bytes` from equal parts on `from` to equal parts on `to`.
    #[must_use]
    pub fn split_concat_s(&self, from: &[u32], to: &[u32], bytes: f64) -> f64 {
        // The original treats receivers on several nodes as a collective, regardless of the senders.
        let Some(node) = self.only_node(to) else { return bytes / INTER_COLLECTIVE_BYTES_PER_S };
        let outside = from.iter().filter(|&&device| self.node_of(device) != node).count();
        match outside {
            0 => bytes / INTRA_BYTES_PER_S,
            _ => bytes / from.len() as f64 * outside as f64 / INTER_BYTES_PER_S,
        }
    }
}
