//! Nodes, devices and links of a cluster, and the time of transfers and all-reduces.
//!
//! A node has equal devices. There is one kind of link inside nodes and one between them.

use crate::error::{Error, Result};

/// A kind of link. All rates are bytes per second in one direction.
#[derive(Debug, Clone, Copy, PartialEq)]
#[cfg_attr(feature = "python", derive(pyo3::FromPyObject))]
pub struct Link {
    /// Point-to-point rate of one port.
    pub bytes_per_s: f64,
    /// Rate that a ring all-reduce reaches on one port.
    pub collective_bytes_per_s: f64,
    /// Seconds that a message of zero bytes takes.
    pub latency_s: f64,
}

/// One node with devices of one type.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Node {
    /// Number of devices of the node.
    pub devices: u32,
    /// Memory of each device, in bytes.
    pub memory_bytes: f64,
    /// Compute speed relative to the device that the profile was measured on. Measured times are divided by it.
    pub speed: f64,
    /// Index of its kind of devices among [`super::DeviceKinds`]. 0 if all kinds differ by one speed only.
    pub kind: u32,
}

/// Nodes and the links between them. Devices are numbered node by node from 0.
#[derive(Debug, Clone, PartialEq)]
pub struct Cluster {
    /// Nodes in the order of their devices.
    pub nodes: Vec<Node>,
    /// Link between devices of one node. Each device has one port.
    pub intra: Link,
    /// Link between nodes. Each node has one port.
    pub inter: Link,
}

/// Time of a transfer as a function of its size: `bytes * s_per_byte + latency_s`.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Rate {
    /// Inverse bandwidth of the port with the most traffic.
    pub s_per_byte: f64,
    /// Seconds that a message of zero bytes takes.
    pub latency_s: f64,
}

impl Cluster {
    /// Checks that every rate, memory size and speed is a positive finite number, so that costs can be computed.
    ///
    /// # Errors
    /// Returns [`Error::Cluster`] that names the node or link and its number.
    pub fn check(&self) -> Result<()> {
        if self.nodes.is_empty() {
            return Err(Error::cluster("the cluster has no node", "add a node"));
        }
        for (index, node) in self.nodes.iter().enumerate() {
            if node.devices == 0 {
                return Err(Error::cluster(format!("node {index} has no device"), "remove the node"));
            }
            for (what, value) in [("memory", node.memory_bytes), ("speed", node.speed)] {
                // The negated comparison also rejects NaN.
                if !(value > 0.0 && value.is_finite()) {
                    return Err(Error::cluster(
                        format!("the {what} of node {index} is {value}, but it must be a positive number"),
                        "set it to a positive number",
                    ));
                }
            }
        }
        for (which, link) in [("inside nodes", self.intra), ("between nodes", self.inter)] {
            let rates = [("bandwidth", link.bytes_per_s), ("collective bandwidth", link.collective_bytes_per_s)];
            for (what, value) in rates {
                if !(value > 0.0 && value.is_finite()) {
                    return Err(Error::cluster(
                        format!("the {what} {which} is {value} bytes/s, but it must be a positive number"),
                        "set it to a positive number",
                    ));
                }
            }
            if !(link.latency_s >= 0.0 && link.latency_s.is_finite()) {
                return Err(Error::cluster(
                    format!("the latency {which} is {} s, but it must be a number of at least 0", link.latency_s),
                    "set it to 0 or more",
                ));
            }
        }
        Ok(())
    }

    /// Returns the number of devices of all nodes.
    #[must_use]
    pub fn devices(&self) -> u32 {
        self.nodes.iter().map(|node| node.devices).sum()
    }

    /// Returns `(node, count)` for each node that has any of `devices`, in ascending order. A device that is
    /// listed twice counts once.
    #[must_use]
    pub fn footprint(&self, devices: &[u32]) -> Vec<(u32, u32)> {
        let mut sorted = devices.to_vec();
        sorted.sort_unstable();
        sorted.dedup();
        // Nodes and devices ascend together, so one pass over both counts all nodes.
        let (mut sorted, mut end) = (sorted.into_iter().peekable(), 0);
        let counts = (0..).zip(&self.nodes).map(|(index, node)| {
            end += node.devices;
            (index, std::iter::from_fn(|| sorted.next_if(|&device| device < end)).count() as u32)
        });
        counts.filter(|&(_, count)| count > 0).collect()
    }

    /// Returns the distinct nodes in the order in which they first appear, and for each node its index among
    /// them.
    #[must_use]
    pub fn classes(&self) -> (Vec<Node>, Vec<usize>) {
        let mut classes: Vec<Node> = Vec::new();
        let class_of = (self.nodes.iter())
            .map(|node| {
                classes.iter().position(|class| class == node).unwrap_or_else(|| {
                    classes.push(*node);
                    classes.len() - 1
                })
            })
            .collect();
        (classes, class_of)
    }

    /// Returns the time of an all-reduce over a stage with at most `widest` devices on each of `nodes` nodes.
    ///
    /// A ring all-reduce sends `2 (n - 1) / n` of the data through each port (Patarasuk & Yuan, 2009). Across nodes
    /// the all-reduce is hierarchical: reduce inside each node, all-reduce over the nodes' ports, broadcast
    /// inside.
    #[must_use]
    pub fn all_reduce(&self, nodes: u32, widest: u32) -> Rate {
        // With one member both terms are zero, so a stage inside one node needs no special case.
        let ring = |members: u32, link: &Link| {
            let members = f64::from(members);
            Rate {
                s_per_byte: 2.0 * (members - 1.0) / members / link.collective_bytes_per_s,
                latency_s: 2.0 * (members - 1.0) * link.latency_s,
            }
        };
        let inside = ring(widest.max(1), &self.intra);
        let across = ring(nodes.max(1), &self.inter);
        Rate { s_per_byte: inside.s_per_byte + across.s_per_byte, latency_s: inside.latency_s + across.latency_s }
    }

    /// Returns the time that a cut's bytes take from the devices of one stage to the devices of the next, or back.
    ///
    /// `on_node` lists `(senders, receivers, nodes)`: the numbers of senders and receivers on each of that number
    /// of nodes. Every sender sends an equal part to every receiver. Inside a node each device has a port, and
    /// between nodes each node has one. Ports work concurrently and in full duplex, so the port with the most
    /// traffic decides, and both directions take the same time.
    #[must_use]
    pub fn transfer(&self, on_node: &[(u32, u32, u32)]) -> Rate {
        let senders: u32 = on_node.iter().map(|&(senders, _, nodes)| senders * nodes).sum();
        let receivers: u32 = on_node.iter().map(|&(_, receivers, nodes)| receivers * nodes).sum();
        let mut inside: f64 = 0.0;
        let mut between: f64 = 0.0;
        // Equal nodes are listed once with their count: large clusters have few distinct pairs of counts.
        for &(here, there, _) in on_node {
            let sent = f64::from(here) / f64::from(senders);
            let received = f64::from(there) / f64::from(receivers);
            // What a node sends to itself does not use its port. The rest leaves it, or arrives, in full duplex.
            between = between.max(sent * (1.0 - received)).max(received * (1.0 - sent));
            if here > 0 && there > 0 {
                inside = inside.max(received / f64::from(senders)).max(sent / f64::from(receivers));
            }
        }
        // A transfer pays one latency: messages of a transfer travel at the same time, and the slowest kind decides.
        Rate {
            s_per_byte: (inside / self.intra.bytes_per_s).max(between / self.inter.bytes_per_s),
            latency_s: if between > 0.0 { self.inter.latency_s } else { self.intra.latency_s },
        }
    }
}
