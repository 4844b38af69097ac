//! A heap of due times whose entries can be taken out at any time.
//!
//! Invariant: entry `i` is not due before its parent, and every item knows where in the heap it
//! stands, so that an acknowledged message leaves nothing behind.

/// Place of an item that is not in the heap.
pub const NOT_IN_HEAP: u32 = u32::MAX;

/// Items by due time.
#[derive(Default)]
pub struct DueHeap {
    entries: Vec<(i64, u32)>,
    /// Place of each item in `entries`.
    places: Vec<u32>,
}

impl DueHeap {
    /// Number of items.
    #[cfg(test)]
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Due time and number of the first item.
    pub fn first(&self) -> Option<(i64, u32)> {
        self.entries.first().copied()
    }

    fn place_of(&self, item: u32) -> usize {
        let place = self.places.get(item as usize);
        place.copied().unwrap_or(NOT_IN_HEAP) as usize
    }

    fn put(&mut self, at: usize, entry: (i64, u32)) {
        if let Some(slot) = self.entries.get_mut(at) {
            *slot = entry;
        }
        if let Some(place) = self.places.get_mut(entry.1 as usize) {
            *place = at as u32;
        }
    }

    fn due_at(&self, at: usize) -> i64 {
        self.entries.get(at).map_or(i64::MAX, |(due, _)| *due)
    }

    /// Adds an item or gives it another due time.
    pub fn set(&mut self, item: u32, due_ms: i64) {
        if self.places.len() <= item as usize {
            self.places.resize(item as usize + 1, NOT_IN_HEAP);
        }
        let mut at = self.place_of(item);
        if at == NOT_IN_HEAP as usize {
            at = self.entries.len();
            self.entries.push((due_ms, item));
        }
        self.put(at, (due_ms, item));
        let at = self.up(at);
        self.down(at);
    }

    /// Takes an item out.
    pub fn remove(&mut self, item: u32) {
        let at = self.place_of(item);
        if at == NOT_IN_HEAP as usize {
            return;
        }
        if let Some(place) = self.places.get_mut(item as usize) {
            *place = NOT_IN_HEAP;
        }
        let Some(last) = self.entries.pop() else {
            return;
        };
        if at < self.entries.len() {
            self.put(at, last);
            let at = self.up(at);
            self.down(at);
        }
    }

    fn up(&mut self, mut at: usize) -> usize {
        while at > 0 {
            let parent = (at - 1) / 2;
            let (Some(own), Some(above)) = (self.entries.get(at), self.entries.get(parent)) else {
                break;
            };
            if above.0 <= own.0 {
                break;
            }
            let (own, above) = (*own, *above);
            self.put(at, above);
            self.put(parent, own);
            at = parent;
        }
        at
    }

    fn down(&mut self, mut at: usize) {
        loop {
            let (left, right) = (2 * at + 1, 2 * at + 2);
            let least = if self.due_at(right) < self.due_at(left) {
                right
            } else {
                left
            };
            if self.due_at(least) >= self.due_at(at) {
                return;
            }
            let (Some(own), Some(below)) = (self.entries.get(at), self.entries.get(least)) else {
                return;
            };
            let (own, below) = (*own, *below);
            self.put(at, below);
            self.put(least, own);
            at = least;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_leave_in_the_order_of_their_times_whatever_is_taken_out_between() {
        let mut heap = DueHeap::default();
        let mut expected = Vec::new();
        let mut seed = 7_u64;
        for item in 0..500 {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            heap.set(item, (seed >> 40) as i64 % 100);
        }
        for item in (0..500).step_by(3) {
            heap.remove(item);
            heap.remove(item);
        }
        for item in (1..500).step_by(3) {
            heap.set(item, i64::from(item) % 17);
            expected.push(i64::from(item) % 17);
        }
        for item in (2..500).step_by(3) {
            heap.set(item, -i64::from(item));
            expected.push(-i64::from(item));
        }
        expected.sort_unstable();
        let mut found = Vec::new();
        while let Some((due, item)) = heap.first() {
            heap.remove(item);
            found.push(due);
        }
        assert_eq!(found, expected);
        assert_eq!(heap.len(), 0);
    }
}
