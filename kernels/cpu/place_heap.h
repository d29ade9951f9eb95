// The order in which places are given, for Recall and UpdateResidency.
#pragma once

#include <cstdint>

namespace sluice::kernels::cpu {
namespace {

// Collects places that may be given, in the order in which to give them: the smallest (stamp,
// place) first, where a free place's stamp is before any other. The `capacity` best are kept, as a
// heap whose top is the worst of them. Its two halves lie where the moves of the units that get the
// places will be.
class PlaceHeap {
 public:
  static constexpr int32_t kFree = INT32_MIN;

  PlaceHeap(int32_t* stamps, int32_t* places, int32_t capacity)
      : stamps_(stamps), places_(places), capacity_(capacity) {}

  int32_t count() const { return count_; }

  void Offer(int32_t stamp, int32_t place) {
    if (count_ < capacity_) {
      int32_t i = count_++;
      for (; i > 0 && Before(Entry((i - 1) / 2), {stamp, place}); i = (i - 1) / 2) {
        Put(i, Entry((i - 1) / 2));
      }
      Put(i, {stamp, place});
    } else if (count_ > 0 && Before({stamp, place}, Entry(0))) {
      Sink({stamp, place}, count_);
    }
  }

  // Leaves the places in the order in which they are given.
  void Sort() {
    for (int32_t end = count_ - 1; end > 0; --end) {
      const Item last = Entry(end);
      Put(end, Entry(0));
      Sink(last, end);
    }
  }

 private:
  struct Item {
    int32_t stamp;
    int32_t place;
  };
  static bool Before(Item a, Item b) {
    return a.stamp != b.stamp ? a.stamp < b.stamp : a.place < b.place;
  }
  Item Entry(int32_t i) const { return {stamps_[i], places_[i]}; }
  void Put(int32_t i, Item item) {
    stamps_[i] = item.stamp;
    places_[i] = item.place;
  }
  // Puts `item` in place of the top of the heap [0, end).
  void Sink(Item item, int32_t end) {
    int32_t i = 0;
    for (int32_t child = 1; child < end; child = 2 * i + 1) {
      if (child + 1 < end && Before(Entry(child), Entry(child + 1))) ++child;
      if (!Before(item, Entry(child))) break;
      Put(i, Entry(child));
      i = child;
    }
    Put(i, item);
  }

  int32_t* stamps_;
  int32_t* places_;
  int32_t capacity_;
  int32_t count_ = 0;
};

}  // namespace
}  // namespace sluice::kernels::cpu
