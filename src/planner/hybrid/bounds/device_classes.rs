//! Lemma *Devices that differ* (docs/proofs.md#devices-that-differ): for any whole numbers of units per speed, an entry
//! for n units is at most the increments of the prefix in any plan that leaves it devices of n units or fewer.
//!
//! A stage whose slowest device has speed v and whose smallest device has memory m is of *class* (v, m): each of its
//! devices has at least both. The bound is strong where units are nearly in proportion to speed.

use crate::cost::network::{Cluster, Node};
use crate::planner::effort::tables;

/// All devices with at least this speed and at least this memory.
#[derive(Debug, Clone)]
pub(crate) struct DeviceClass {
    pub speed: f64,
    pub memory_bytes: f64,
    /// Flags of all classes: whether the class contains all devices of this one.
    pub contained_in: Vec<bool>,
    /// Devices of the largest node with exactly this speed and memory. `None` if no node has both: then a stage of this
    /// class is on several nodes.
    pub widest: Option<u32>,
    /// Number of all these devices.
    pub devices: u32,
}

/// Returns the classes that a stage may have. The first one has all devices, and the others have subsets of them.
pub(crate) fn device_classes(cluster: &Cluster) -> Vec<DeviceClass> {
    // Each type of device is a class of its own, so more types than classes need not be combined at all.
    let order = |a: &&Node, b: &&Node| a.speed.total_cmp(&b.speed).then(a.memory_bytes.total_cmp(&b.memory_bytes));
    let mut types: Vec<&Node> = cluster.nodes.iter().collect();
    types.sort_by(order);
    types.dedup_by(|b, a| order(&&**a, &&**b).is_eq());
    if types.len() > tables::MAX_DEVICE_CLASSES {
        return vec![single_class(cluster)];
    }
    let values = |value: fn(&Node) -> f64| {
        let mut values: Vec<f64> = cluster.nodes.iter().map(value).collect();
        values.sort_by(f64::total_cmp);
        values.dedup();
        values
    };
    let (speeds, memories) = (values(|node| node.speed), values(|node| node.memory_bytes));
    let has = |node: &Node, speed: f64, memory: f64| node.speed >= speed && node.memory_bytes >= memory;
    let is = |one: f64, other: f64| one.total_cmp(&other).is_eq();
    let mut classes = Vec::new();
    for &speed in &speeds {
        for &memory_bytes in &memories {
            let members: Vec<&Node> = cluster.nodes.iter().filter(|node| has(node, speed, memory_bytes)).collect();
            let is_slowest = members.iter().any(|node| is(node.speed, speed));
            let is_smallest = members.iter().any(|node| is(node.memory_bytes, memory_bytes));
            // Other pairs are no class of their own: the same devices form a class with a higher limit.
            if is_slowest && is_smallest {
                let own = members.iter().filter(|node| is(node.speed, speed) && is(node.memory_bytes, memory_bytes));
                classes.push(DeviceClass {
                    speed,
                    memory_bytes,
                    contained_in: Vec::new(),
                    widest: own.map(|node| node.devices).max(),
                    devices: members.iter().map(|node| node.devices).sum(),
                });
            }
        }
    }
    // Callers rely on the first class having all devices.
    let all = cluster.devices();
    if classes.len() > tables::MAX_DEVICE_CLASSES || classes.first().is_none_or(|class| class.devices < all) {
        return vec![single_class(cluster)];
    }
    let limits: Vec<(f64, f64)> = classes.iter().map(|class| (class.speed, class.memory_bytes)).collect();
    for class in &mut classes {
        class.contained_in = (limits.iter())
            .map(|&(speed, memory_bytes)| class.speed >= speed && class.memory_bytes >= memory_bytes)
            .collect();
    }
    classes
}

/// Returns all devices as one class of the highest speed and the largest memory.
fn single_class(cluster: &Cluster) -> DeviceClass {
    DeviceClass {
        speed: cluster.nodes.iter().map(|node| node.speed).fold(0.0, f64::max),
        memory_bytes: cluster.nodes.iter().map(|node| node.memory_bytes).fold(0.0, f64::max),
        contained_in: vec![true],
        widest: cluster.nodes.iter().map(|node| node.devices).max(),
        devices: cluster.devices(),
    }
}

/// Whole numbers of units, nearly in proportion to speed, so that free devices of several speeds are one number.
#[derive(Debug, Clone)]
pub(crate) struct Units {
    /// Speeds, slowest first, and the units of a device of each.
    of_speed: Vec<(f64, u32)>,
}

impl Units {
    /// Returns the units of a cluster. Every device counts 1 if there is a single class.
    ///
    /// The fastest device counts at most [`tables::MAX_UNITS`].
    pub(crate) fn new(cluster: &Cluster) -> Self {
        let mut speeds: Vec<f64> = cluster.nodes.iter().map(|node| node.speed).collect();
        speeds.sort_by(f64::total_cmp);
        speeds.dedup();
        let fastest = speeds.last().copied().unwrap_or(1.0);
        #[expect(clippy::cast_sign_loss, reason = "speeds are above zero")]
        let whole = |units: f64| (units.round() as u32).max(1);
        let units_up_to = |max_units: u32| Self {
            of_speed: speeds.iter().map(|&speed| (speed, whole(speed / fastest * f64::from(max_units)))).collect(),
        };
        let mut best = units_up_to(1);
        if device_classes(cluster).len() == 1 {
            return best;
        }
        let mut min_loss = best.loss(cluster);
        // Few units mean small tables, so take the smallest number whose rounding loses little.
        for max_units in 2..=tables::MAX_UNITS {
            if min_loss <= tables::UNIT_LOSS {
                break;
            }
            let units = units_up_to(max_units);
            let loss = units.loss(cluster);
            if loss < min_loss {
                (best, min_loss) = (units, loss);
            }
        }
        best
    }

    /// Returns the share by which all units, at the highest speed per unit, exceed the speed of all devices.
    fn loss(&self, cluster: &Cluster) -> f64 {
        let speed_per_unit = self.of_speed.iter().map(|&(speed, each)| speed / f64::from(each)).fold(0.0, f64::max);
        let speed: f64 = cluster.nodes.iter().map(|m| f64::from(m.devices) * m.speed).sum();
        speed_per_unit * f64::from(self.all(cluster)) / speed - 1.0
    }

    /// Returns the units of a device of this speed, or of the next higher speed in the cluster.
    pub(crate) fn of(&self, speed: f64) -> u32 {
        let at = self.of_speed.partition_point(|&(slower, _)| slower < speed);
        self.of_speed.get(at).map_or(1, |&(_, each)| each)
    }

    /// Returns pairs `(units, devices)` of a class: the devices that count this many units, fewest units first.
    pub(crate) fn of_class(&self, cluster: &Cluster, class: &DeviceClass) -> Vec<(u32, u32)> {
        let has = |node: &&Node| node.speed >= class.speed && node.memory_bytes >= class.memory_bytes;
        let mut each: Vec<(u32, u32)> =
            cluster.nodes.iter().filter(has).map(|node| (self.of(node.speed), node.devices)).collect();
        each.sort_unstable();
        each.dedup_by(|b, a| {
            let is_same = a.0 == b.0;
            a.1 += if is_same { b.1 } else { 0 };
            is_same
        });
        each
    }

    /// Returns the units of all devices.
    pub(crate) fn all(&self, cluster: &Cluster) -> u32 {
        cluster.nodes.iter().map(|node| node.devices * self.of(node.speed)).sum()
    }
}
