// Encodes events in msgpack. Only this file includes its library.
#include "src/service/events/event_format.h"

#include <algorithm>
#include <iterator>
#include <msgpack.hpp>
#include <optional>
#include <string_view>
#include <utility>

namespace sluice {
namespace {

// The caches that sequences share lie in host memory.
constexpr std::string_view kMedium = "CPU";
constexpr int kDataParallelRank = 0;  // a node is one

using Packer = msgpack::packer<msgpack::sbuffer>;

void Pack(Packer& to, std::string_view text) {
  to.pack_str(static_cast<uint32_t>(text.size()));
  to.pack_str_body(text.data(), static_cast<uint32_t>(text.size()));
}

template <typename T>
void Pack(Packer& to, const std::vector<T>& numbers) {
  to.pack_array(static_cast<uint32_t>(numbers.size()));
  for (const T number : numbers) to.pack(number);
}

// Writes an event's fields, with their names in a map. The first field says which event it is.
class Fields {
 public:
  Fields(Packer& to, EventSchema schema, uint32_t count, std::string_view type)
      : to_(to), named_(schema == EventSchema::kMaps) {
    if (named_) {
      to_.pack_map(count + 1);
    } else {
      to_.pack_array(count + 1);
    }
    Text("type", type);
  }
  Packer& Name(std::string_view name) {
    if (named_) Pack(to_, name);
    return to_;
  }
  void Text(std::string_view name, std::string_view text) { Pack(Name(name), text); }
  void None(std::string_view name) { Name(name).pack_nil(); }

 private:
  Packer& to_;
  const bool named_;
};

void PackStored(Packer& to, const KvEvent& event, int64_t unit, EventSchema schema) {
  Fields fields(to, schema, 7, "BlockStored");
  Pack(fields.Name("block_hashes"), event.hashes);
  if (event.parent.has_value()) {
    fields.Name("parent_block_hash").pack(*event.parent);
  } else {
    fields.None("parent_block_hash");
  }
  Pack(fields.Name("token_ids"), event.tokens);
  fields.Name("block_size").pack(unit);
  fields.None("lora_id");
  fields.Text("medium", kMedium);
  fields.None("lora_name");
}

void PackEvent(Packer& to, const KvEvent& event, int64_t unit, EventSchema schema) {
  if (event.kind == KvEvent::Kind::kStored) {
    PackStored(to, event, unit, schema);
  } else if (event.kind == KvEvent::Kind::kRemoved) {
    Fields fields(to, schema, 2, "BlockRemoved");
    Pack(fields.Name("block_hashes"), event.hashes);
    fields.Text("medium", kMedium);
  } else {
    Fields(to, schema, 0, "AllBlocksCleared");
  }
}

// Returns the units [begin, end) of an event.
KvEvent Slice(const KvEvent& event, size_t begin, size_t end, size_t unit) {
  KvEvent slice;
  slice.kind = event.kind;
  slice.parent = begin == 0 ? event.parent : std::optional<uint64_t>(event.hashes[begin - 1]);
  const auto hashes = event.hashes.begin();
  slice.hashes.assign(hashes + static_cast<ptrdiff_t>(begin), hashes + static_cast<ptrdiff_t>(end));
  if (event.kind == KvEvent::Kind::kStored) {
    const auto tokens = event.tokens.begin();
    slice.tokens.assign(tokens + static_cast<ptrdiff_t>(begin * unit),
                        tokens + static_cast<ptrdiff_t>(end * unit));
  }
  return slice;
}

}  // namespace

std::string EncodeBatch(double seconds, const std::vector<KvEvent>& events, int64_t unit,
                        EventSchema schema) {
  msgpack::sbuffer out;
  Packer to(out);
  to.pack_array(3);
  to.pack(seconds);
  to.pack_array(static_cast<uint32_t>(events.size()));
  for (const KvEvent& event : events) PackEvent(to, event, unit, schema);
  to.pack(kDataParallelRank);
  return {out.data(), out.size()};
}

std::vector<std::vector<KvEvent>> CutIntoBatches(std::vector<KvEvent> events, int64_t unit,
                                                 size_t max_units) {
  std::vector<std::vector<KvEvent>> batches;
  size_t room = 0;
  for (KvEvent& event : events) {
    size_t begin = 0;
    do {
      if (room == 0) {
        batches.emplace_back();
        room = max_units;
      }
      const size_t units = std::min(event.hashes.size() - begin, room);
      const bool whole = units == event.hashes.size();
      batches.back().push_back(
          whole ? std::move(event) : Slice(event, begin, begin + units, static_cast<size_t>(unit)));
      // An event without hashes takes some room too.
      room -= std::max<size_t>(units, 1);
      if (whole) break;
      begin += units;
    } while (begin < event.hashes.size());
  }
  return batches;
}

std::string EncodeSequence(uint64_t sequence) {
  std::string bytes(sizeof(sequence), '\0');
  for (int i = 7; i >= 0; --i, sequence >>= 8) {
    bytes[static_cast<size_t>(i)] = static_cast<char>(sequence & 0xff);
  }
  return bytes;
}

}  // namespace sluice
