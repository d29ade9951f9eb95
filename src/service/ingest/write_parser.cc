#include "src/service/ingest/write_parser.h"

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/wire_format_lite.h>

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "sluice/v1/ingest.pb.h"
#include "src/base/error.h"
#include "src/base/status_macros.h"
#include "src/service/wire/proto_conversion.h"

namespace sluice {
namespace {

using google::protobuf::internal::WireFormatLite;
using google::protobuf::io::CodedInputStream;

constexpr uint32_t Tag(int field) {
  return WireFormatLite::MakeTag(field, WireFormatLite::WIRETYPE_LENGTH_DELIMITED);
}

absl::Status ReadHeader(CodedInputStream& in, ChunkHeader* out) {
  uint32_t bytes = 0;
  std::string text;
  if (!in.ReadVarint32(&bytes)) return InvalidField("header", "its length is not readable");
  if (bytes > kMaxChunkHeaderBytes) {
    return InvalidField("header", absl::StrCat("at most ", kMaxChunkHeaderBytes,
                                               " bytes are expected, found ", bytes));
  }
  v1::ChunkHeader header;
  if (!in.ReadString(&text, static_cast<int>(bytes))) {
    return InvalidField("header", "the message ends inside it");
  }
  if (!header.ParseFromString(text)) return InvalidField("header", "is not a ChunkHeader");
  SLUICE_ASSIGN_OR_RETURN(*out, FromProto(header));
  return absl::OkStatus();
}

absl::Status ReadPayload(CodedInputStream& in, uint64_t message_bytes, const ChunkHeader& header,
                         ChunkSink& sink) {
  uint32_t bytes = 0;
  if (!in.ReadVarint32(&bytes)) return InvalidField("payload", "its length is not readable");
  const uint64_t left = message_bytes - static_cast<uint64_t>(in.CurrentPosition());
  if (bytes > left) {
    return InvalidField(
        "payload", absl::StrCat("is announced with ", bytes, " bytes, but only ", left, " follow"));
  }
  SLUICE_RETURN_IF_ERROR(sink.Begin(header, bytes));
  while (bytes > 0) {
    const void* data = nullptr;
    int size = 0;
    if (!in.GetDirectBufferPointer(&data, &size)) {
      return InvalidField("payload", "the message ends inside it");
    }
    const int take = static_cast<int>(std::min<uint32_t>(bytes, static_cast<uint32_t>(size)));
    sink.Append({static_cast<const uint8_t*>(data), static_cast<size_t>(take)});
    in.Skip(take);
    bytes -= static_cast<uint32_t>(take);
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ParseWriteRequest(google::protobuf::io::ZeroCopyInputStream* message,
                               uint64_t message_bytes, ChunkSink& sink) {
  CodedInputStream in(message);
  ChunkHeader header;
  bool has_header = false;
  bool has_payload = false;
  while (const uint32_t tag = in.ReadTag()) {
    if (tag == Tag(v1::WriteRequest::kHeaderFieldNumber)) {
      if (has_header) return InvalidField("header", "comes twice in one message");
      SLUICE_RETURN_IF_ERROR(ReadHeader(in, &header));
      has_header = true;
    } else if (tag == Tag(v1::WriteRequest::kPayloadFieldNumber)) {
      if (!has_header) return InvalidField("header", "must come before the payload");
      if (has_payload) return InvalidField("payload", "comes twice in one message");
      SLUICE_RETURN_IF_ERROR(ReadPayload(in, message_bytes, header, sink));
      has_payload = true;
    } else if (!WireFormatLite::SkipField(&in, tag)) {
      return InvalidField("message", absl::StrCat("is not a WriteRequest: field ", tag >> 3,
                                                  " is malformed or truncated"));
    }
  }
  if (!in.ConsumedEntireMessage()) {
    return InvalidField("message",
                        "is not a WriteRequest: a field's tag is malformed or truncated");
  }
  if (!has_header) return InvalidField("header", "is missing");
  if (!has_payload) return InvalidField("payload", "is missing");
  return absl::OkStatus();
}

}  // namespace sluice
